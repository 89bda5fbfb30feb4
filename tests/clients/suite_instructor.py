"""instructor: typed answers by forced tools and by JSON schemas, whole and streamed."""

from __future__ import annotations

import os
from typing import Any

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel

MODES = [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA]


class City(BaseModel):
    """An answer of a given form."""

    name: str
    is_large: bool


def asked(mode: Any, kind: Any, **options: Any) -> Any:
    client = instructor.from_openai(OpenAI(base_url=os.environ["LLAMAC_URL"] + "/v1", api_key="none"), mode=mode)
    messages: Any = [{"role": "user", "content": "Describe the city of Oslo, Norway."}]
    common: Any = {"model": "smollm2", "messages": messages, "max_tokens": 200, "temperature": 0, "max_retries": 0}
    return client.chat.completions.create(response_model=kind, **common, **options)


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_has_the_form_of_a_class(mode: Any) -> None:
    assert isinstance(asked(mode, City), City)


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_arrives_in_pieces(mode: Any) -> None:
    pieces = list(asked(mode, instructor.Partial[City], stream=True))
    assert len(pieces) > 1
    assert pieces[-1].name is not None

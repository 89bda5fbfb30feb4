"""The prompts that a model's files put before texts: the default one, and others by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llamac.arguments import wrong_type
from llamac.errors import ArgumentError, ModelError

if TYPE_CHECKING:
    from llamac.engine.model import Model


def default_prompt(model: Model) -> str | None:
    """The prompt in the file's metadata, or None.

    Raises:
        ModelError: If it is not a text.
    """
    prompt = model.file.metadata.get("prompt")
    if not isinstance(prompt, str | None):
        raise ModelError(f"{model.file.path}: metadata: prompt is {prompt!r:.80}, expected a text")
    return prompt


def named_prompts(model: Model) -> dict[str, str]:
    """The prompts in the file's metadata by name.

    Raises:
        ModelError: If they are not texts.
    """
    prompts = model.file.metadata.get("prompts", {})
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"{model.file.path}: metadata: prompts is {prompts!r:.80}, expected texts by name")
    return prompts


def chosen_prompt(model: Model, prompt: str | None, name: str | None) -> str:
    """The prompt that was given, has the name, or is the default; "" without one.

    Raises:
        ArgumentError: If both are given, or the model has no prompt of this name.
        ModelError: If the file's metadata has the wrong type.
    """
    if not isinstance(prompt, str | None):
        raise wrong_type("prompt", prompt, "a str")
    if not isinstance(name, str | None):
        raise wrong_type("prompt_name", name, "a str")
    if name is None:
        return (default_prompt(model) or "") if prompt is None else prompt
    if prompt is not None:
        raise ArgumentError("prompt and prompt_name cannot be combined: give only one of them")
    prompts = named_prompts(model)
    if name not in prompts:
        known = f"its prompts are {', '.join(map(repr, sorted(prompts)))}" if prompts else "it has none"
        raise ArgumentError(f"prompt_name is {name!r}, which is not a prompt of the model: {known}")
    return prompts[name]

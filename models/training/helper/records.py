"""Answers in JSON: with named keys or with a schema, from a passage or from a record of any keys."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from . import facts
from . import words as w
from .conversation import Conversation, new
from .dice import Dice, Pool

FORMS = Pool(
    "{text}\n\nAnswer in JSON with the keys {keys}.",
    "Answer in JSON with the keys {keys}.\n\n{text}",
    "{text}\n\nWrite this as JSON. Keys: {keys}",
    "Write a JSON object with the keys {keys} from this text: {text}",
    "Write this as JSON with the keys {keys}: {text}",
    "Text: {text}\n\nGive me {keys} as JSON.",
    "Give me {keys} as JSON: {text}",
    "Read the text and answer in JSON. Text: {text} Keys: {keys}",
    "{text} Answer with a JSON object. Its keys are {keys}.",
    "Text: {text}\n\nWrite a JSON object with the keys {keys}.",
)
SYSTEM = Pool(
    "Answer in JSON with the keys {keys}.",
    "Answer only in JSON. The keys are {keys}.",
    "You write JSON objects with the keys {keys}.",
    "Write each message as JSON with the keys {keys}.",
    "Answer only in JSON with the keys {keys}.",
)
SCHEMA_FORMS = Pool(
    "{text}\n\nAnswer in JSON that follows this schema:\n{schema}",
    "Answer in JSON that follows this schema: {schema}\n\n{text}",
    "Follow this schema: {schema}\n\nText: {text}",
    "{text}\n\nSchema: {schema}",
    "Text: {text}\n\nAnswer in JSON that follows this schema: {schema}",
)
SCHEMA_SYSTEM = Pool(
    "Answer in JSON that follows this schema:\n{schema}",
    "Answer only in JSON. Schema: {schema}",
    "Always answer in JSON. Follow this schema: {schema}",
    "You answer in JSON that follows this schema: {schema}",
    "Answer only in JSON. Follow this schema: {schema}",
)

Record = dict[str, Any]

FIELDS: tuple[tuple[str, Callable[[Dice], Any]], ...] = (
    ("name", w.full_name),
    ("city", w.town),
    ("town", w.town),
    ("age", lambda dice: dice.number(1, 99)),
    ("price", lambda dice: dice.number(1, 999)),
    ("count", lambda dice: dice.number(1, 60)),
    ("year", lambda dice: dice.number(1800, 2035)),
    ("date", w.date),
    ("time", w.clock),
    ("email", w.email),
    ("color", lambda dice: dice.pick(w.COLORS)),
    ("job", lambda dice: dice.pick(w.JOBS)),
    ("code", lambda dice: dice.code()),
    ("id", lambda dice: dice.code()),
    ("title", w.thing),
    ("product", w.thing),
    ("active", lambda dice: dice.chance(1, 2)),
    ("paid", lambda dice: dice.chance(1, 2)),
    ("open", lambda dice: dice.chance(1, 2)),
    ("tags", lambda dice: dice.several(w.THEMES, dice.number(1, 3))),
    ("colors", lambda dice: dice.several(w.COLORS, dice.number(1, 3))),
    ("items", lambda dice: dice.several(w.OBJECTS, dice.number(1, 3))),
)


def _plain(value: object) -> str:
    """A value as a record shows it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    return str(value)


def _type_of(value: object) -> dict[str, Any]:
    """The schema of a value."""
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer"}
    if isinstance(value, list):
        return {"type": "array", "items": {"type": "string"}}
    return {"type": "string"}


def _fields(dice: Dice) -> Record:
    """A record: usual keys, or invented ones with words, numbers and codes."""
    count = dice.number(1 + dice.level, 3 + dice.level)
    record: Record = {}
    for key, value_of in dice.shuffled(FIELDS)[:count]:
        if dice.chance(1, 4):
            key = dice.coin(2)
        record[key] = value_of(dice)
    return record


def _from_fields(dice: Dice) -> tuple[str, Record]:
    """A record as "key: value" lines or pairs, and the wanted part of it in another order."""
    record = _fields(dice)
    pairs = [f"{key}: {_plain(value)}" for key, value in record.items()]
    text = dice.choose(("\n", "; ")).join(pairs)
    wanted = dice.shuffled(list(record))[: dice.number(1, len(record))]
    return text, {key: record[key] for key in wanted}


def _from_facts(dice: Dice) -> tuple[str, Record]:
    """Sentences about one subject, and some of what they say; "name" is the subject itself."""
    name, attributes = dice.choose(facts.KINDS)
    subject = name(dice)
    chosen = dice.shuffled(attributes)[: dice.number(2, 3 + dice.level)]
    if dice.chance(1, 4):
        chosen[0] = facts.invented(dice)
    said = [facts.state(dice, subject, each) for each in chosen]
    record: Record = {"name": subject.removeprefix("the ")} if dice.chance(2, 3) else {}
    for fact in dice.shuffled(said)[: dice.number(1, len(said))]:
        record[fact.attribute.key] = fact.value
    keys = dice.shuffled(list(record))
    if dice.chance(1, 8):
        missing = [each.key for each in attributes if each not in [fact.attribute for fact in said]]
        if missing:
            keys.append(dice.choose(missing))
    return facts.World(said, []).text, {key: record.get(key) for key in keys}


def _source(dice: Dice) -> tuple[str, Record]:
    return _from_fields(dice) if dice.chance(1, 2) else _from_facts(dice)


def _named(keys: list[str], dice: Dice) -> str:
    """The keys as a text: "name and age", or "name, age"."""
    keys = [f'"{key}"' for key in keys] if dice.chance(1, 4) else keys
    if len(keys) < 2 or dice.chance(1, 3):
        return ", ".join(keys)
    return f"{', '.join(keys[:-1])} and {keys[-1]}"


def with_keys(dice: Dice) -> Conversation:
    """The user or the system message names the keys."""
    text, record = _source(dice)
    keys = _named(list(record), dice)
    if dice.chance(1, 3):
        conversation = Conversation("json")
        conversation.system(dice.pick(SYSTEM).format(keys=keys))
        conversation.user(text)
    else:
        conversation = new("json", dice)
        conversation.user(dice.pick(FORMS).format(text=text, keys=keys))
    conversation.answer_json(record)
    return conversation


def with_schema(dice: Dice) -> Conversation:
    """A schema gives the keys, their order and their types; a number may be wanted as a string."""
    text, record = _source(dice)
    properties: dict[str, Any] = {}
    for key, value in record.items():
        properties[key] = {"type": "null"} if value is None else _type_of(value)
        if isinstance(value, int) and not isinstance(value, bool) and dice.chance(1, 5):
            properties[key] = {"type": "string"}
            record[key] = str(value)
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if dice.chance(2, 3):
        schema["required"] = list(properties)
    if dice.chance(1, 4):
        schema["additionalProperties"] = False
    if dice.chance(1, 3):
        conversation = Conversation("schema")
        conversation.system(dice.pick(SCHEMA_SYSTEM).format(schema=json.dumps(schema)))
        conversation.user(text)
    else:
        conversation = new("schema", dice)
        conversation.user(dice.pick(SCHEMA_FORMS).format(text=text, schema=json.dumps(schema)))
    conversation.answer_json(record)
    return conversation

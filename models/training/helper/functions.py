"""Definitions of tools: some that people often write, and invented ones, with sentences that ask for a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from . import words as w
from .dice import Dice, Pool, words

Value = Any


@dataclass(frozen=True)
class Parameter:
    """A parameter of a tool: its name, JSON schema and description, and how to draw a value.

    Attributes:
        required: Whether the schema lists it as required.
        asked: Whether requests name a value. If not, calls leave the parameter out.
        field: Its name in the templates of requests; empty: `name`.
    """

    name: str
    schema: dict[str, Any]
    description: str
    value: Callable[[Dice], Value]
    required: bool = True
    asked: bool = True
    field: str = ""


@dataclass(frozen=True)
class Function:
    """A tool. `asks` are templates of requests with the names of parameters as fields; `origin` is its usual name."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    asks: Pool[str]
    result: Callable[[Dice], dict[str, Any]]
    origin: str = ""

    def definition(self) -> dict[str, Any]:
        """The tool in the form of OpenAI's API, which chat templates read."""
        properties = {}
        for each in self.parameters:
            properties[each.name] = each.schema | ({"description": each.description} if each.description else {})
        schema = {
            "type": "object",
            "properties": properties,
            "required": [each.name for each in self.parameters if each.required],
        }
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


def shown(value: Value) -> str:
    """A value as a request says it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


LANGUAGES = words("French German Spanish Italian Polish Greek Turkish Dutch Swedish Japanese")
MONEY = words("dollars euros pounds francs yen crowns pesos rupees rubles kroner")
STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}
NUMBER: dict[str, Any] = {"type": "number"}
BOOLEAN: dict[str, Any] = {"type": "boolean"}
STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}


def integer(low: int, high: int) -> Callable[[Dice], int]:
    """Draw a whole number."""
    return lambda dice: dice.number(low, high)


def decimal(dice: Dice) -> float:
    """Draw a number with one digit after the point."""
    return dice.number(0, 99) + dice.number(1, 9) / 10


def _status(dice: Dice) -> dict[str, Any]:
    return dice.choose(({"status": "ok"}, {"status": "done", "id": dice.code()}, {"id": dice.code()}))


def _string(name: str, description: str, value: Callable[[Dice], Value]) -> Parameter:
    return Parameter(name, STRING, description, value)


USUAL = (
    Function(
        "get_weather", "Get the weather in a city.", (_string("city", "The city", w.town),),
        Pool("What is the weather in {city}?", "How is the weather in {city}?", "Tell me the weather in {city}.",
             "Is it raining in {city}?", "Tell me how the weather is in {city}."),
        lambda dice: {"temperature": dice.number(-20, 40), "weather": dice.pick(w.WEATHER)},
    ),
    Function(
        "get_weather", "Get the current weather", (
            _string("location", "Name of the city", w.town),
            Parameter("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}, "",
                      lambda dice: dice.choose(("celsius", "fahrenheit"))),
        ),
        Pool("What is the weather in {location} in {unit}?", "How is the weather in {location}, in {unit}?",
             "Tell me the weather in {location} in {unit}.", "Give me the weather in {location} in {unit}.",
             "Tell me how the weather is in {location}, in {unit}."),
        lambda dice: {"temperature": dice.number(-20, 90), "weather": dice.pick(w.WEATHER)},
    ),
    Function(
        "get_time", "Get the time in a city.", (_string("city", "The city", w.town),),
        Pool("What time is it in {city}?", "What is the time in {city}?", "Tell me the time in {city}.",
             "How late is it in {city}?", "Tell me what time it is in {city}."),
        lambda dice: {"time": w.clock(dice)},
    ),
    Function(
        "add", "Add two numbers.", (
            Parameter("a", INTEGER, "The first number", integer(0, 9999)),
            Parameter("b", INTEGER, "The second number", integer(0, 9999)),
        ),
        Pool("What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?", "What is {a} + {b}?",
             "How much is {a} plus {b}?"),
        lambda dice: {"result": dice.number(0, 20000)},
    ),
    Function(
        "multiply", "Multiply two numbers.", (
            Parameter("a", NUMBER, "The first number", integer(0, 999)),
            Parameter("b", NUMBER, "The second number", decimal),
        ),
        Pool("What is {a} times {b}?", "Multiply {a} by {b}.", "How much is {a} times {b}?", "Multiply {a} and {b}.",
             "What is {a} multiplied by {b}?"),
        lambda dice: {"result": dice.number(0, 90000)},
    ),
    Function(
        "search", "Search the web.", (_string("query", "What to search for", lambda dice: _query(dice)),),
        Pool("Search for {query}.", "Search the web for {query}.", "Find something about {query}.",
             "Look up {query}.", "Search the web for something about {query}."),
        lambda dice: {"results": [w.thing(dice), w.brand(dice)]},
    ),
    Function(
        "send_message", "Send a message to somebody.", (
            _string("to", "Who gets the message", w.person),
            _string("text", "The message", w.short_text),
        ),
        Pool('Send {to} the message "{text}"', "Tell {to}: {text}", "Send a message to {to}: {text}",
             'Write to {to}: "{text}"', 'Send a message to {to}: "{text}"'),
        lambda dice: {"status": "sent"},
    ),
    Function(
        "send_email", "Send an email", (
            _string("address", "The email address", w.email),
            _string("subject", "", lambda dice: dice.pick(w.THEMES)),
            _string("body", "", w.short_text),
        ),
        Pool('Send an email to {address} about {subject}: "{body}"',
             'Write an email to {address}. Subject: {subject}. Text: "{body}"',
             'Email {address} about {subject} and say: "{body}"', 'Write an email to {address} about {subject}: {body}',
             'Send an email to {address}. Subject: {subject}. Text: "{body}"'),
        lambda dice: {"status": "sent", "id": dice.code()},
    ),
    Function(
        "set_alarm", "Set an alarm", (_string("time", "Time of day", w.clock),),
        Pool("Set an alarm for {time}.", "Wake me at {time}.", "I need an alarm at {time}.", "Set the alarm to {time}.",
             "I need an alarm for {time}."),
        _status,
    ),
    Function(
        "set_timer", "Start a timer", (Parameter("minutes", INTEGER, "", integer(1, 120)),),
        Pool("Set a timer for {minutes} minutes.", "Start a timer of {minutes} minutes.", "Timer: {minutes} minutes",
             "Remind me in {minutes} minutes.", "Start a timer for {minutes} minutes."),
        _status,
    ),
    Function(
        "book_table", "Book a table in a restaurant", (
            _string("restaurant", "", w.brand),
            Parameter("people", INTEGER, "How many people", integer(1, 20)),
            _string("time", "", w.clock),
        ),
        Pool("Book a table for {people} people at {restaurant} at {time}.",
             "I need a table at {restaurant} for {people} people at {time}.",
             "Book a table at {restaurant} at {time} for {people}.",
             "We are {people} people and want to eat at {restaurant} at {time}.",
             "I need a table for {people} people at {time} at {restaurant}."),
        lambda dice: {"status": "booked", "code": dice.code()},
    ),
    Function(
        "find_trains", "Find trains between two cities", (
            _string("origin", "Where the trip begins", w.town),
            _string("destination", "Where the trip ends", w.town),
            _string("date", "", w.date),
        ),
        Pool("Find a train from {origin} to {destination} on {date}.",
             "Which trains go from {origin} to {destination} on {date}?",
             "On {date}, I travel from {origin} to {destination} by train.",
             "I need a train to {destination} from {origin} on {date}.",
             "On {date}, I need a train from {origin} to {destination}."),
        lambda dice: {"train": dice.code(), "departure": w.clock(dice)},
    ),
    Function(
        "turn_light", "Turn a light on or off", (
            _string("room", "", lambda dice: dice.pick(w.ROOMS)),
            Parameter("state", {"type": "string", "enum": ["on", "off"]}, "",
                      lambda dice: dice.choose(("on", "off"))),
        ),
        Pool("Turn {state} the light in the {room}.", "Turn the light in the {room} {state}.",
             "Light {state} in the {room}, please.", "Please turn {state} the light in the {room}.",
             "Please turn the light in the {room} {state}."),
        _status,
    ),
    Function(
        "add_to_list", "Put things on the shopping list",
        (Parameter("items", STRINGS, "What to buy", lambda dice: dice.several(w.FOODS, dice.number(1, 3))),),
        Pool("Put {items} on my list.", "Add to the shopping list: {items}", "I need to buy {items}.",
             "Add {items} to my list.", "Put on the shopping list: {items}"),
        _status,
    ),
    Function(
        "translate", "Translate a text", (
            _string("text", "", w.short_text),
            _string("language", "", lambda dice: dice.pick(LANGUAGES)),
        ),
        Pool('Translate "{text}" to {language}.', "Translate to {language}: {text}",
             'How do you say "{text}" in {language}?', 'What is "{text}" in {language}?',
             'Translate this to {language}: "{text}"'),
        lambda dice: {"translation": f"{dice.coin()} {dice.coin()}"},
    ),
    Function(
        "get_stock_price", "Get the price of a stock", (_string("company", "", w.brand),),
        Pool("What is the stock price of {company}?", "How much is a stock of {company}?",
             "Tell me the stock price of {company}.", "Get the price of {company} stock.",
             "How much is the stock of {company}?"),
        lambda dice: {"price": dice.number(2, 900)},
    ),
    Function(
        "create_event", "Put an event into the calendar", (
            _string("title", "", lambda dice: f"{dice.coin()} {dice.pick(w.EVENTS)}"),
            _string("date", "", w.date),
            _string("time", "", w.clock),
        ),
        Pool("Put {title} into my calendar on {date} at {time}.", "I have {title} on {date} at {time}.",
             "Create an event: {title}, {date}, {time}", "On {date} at {time} there is {title}.",
             "Create an event on {date} at {time}: {title}"),
        _status,
    ),
    Function(
        "convert_money", "Convert money", (
            Parameter("amount", NUMBER, "", integer(1, 9000)),
            _string("from", "", lambda dice: dice.pick(MONEY)),
            _string("to", "", lambda dice: dice.pick(MONEY)),
        ),
        Pool("How much are {amount} {from} in {to}?", "Convert {amount} {from} to {to}.",
             "I have {amount} {from}. How much is that in {to}?", "What are {amount} {from} in {to}?",
             "I need {amount} {from} in {to}."),
        lambda dice: {"result": dice.number(1, 9000)},
    ),
    Function(
        "play_music", "Play music", (_string("artist", "", w.full_name),),
        Pool("Play something by {artist}.", "Play music by {artist}.", "I want to hear {artist}.", "Play {artist}.",
             "I want to hear something by {artist}."),
        lambda dice: {"playing": w.brand(dice)},
    ),
    Function(
        "get_news", "Get the news about a topic", (_string("topic", "", lambda dice: dice.pick(w.THEMES)),),
        Pool("What is new in {topic}?", "Give me the news about {topic}.", "Any news about {topic}?",
             "Tell me the news about {topic}.", "What is the news about {topic}?"),
        lambda dice: {"title": w.short_text(dice)},
    ),
    Function(
        "read_file", "Read a file", (_string("path", "The file", lambda dice: _path(dice)),),
        Pool("Read the file {path}.", "Open {path}.", "What is in {path}?", "Show me {path}.",
             "What is in the file {path}?"),
        lambda dice: {"text": w.short_text(dice)},
    ),
    Function(
        "get_user", "Find a user", (Parameter("id", INTEGER, "The number of the user", integer(1, 99999)),),
        Pool("Who is user {id}?", "Find the user with the id {id}.", "Show user {id}.", "Get user {id}.",
             "Show the user with the id {id}."),
        lambda dice: {"name": w.full_name(dice), "email": w.email(dice)},
    ),
    Function(
        "find_restaurant", "Find a restaurant", (
            _string("city", "", w.town),
            _string("food", "What they serve", lambda dice: dice.pick(w.FOODS)),
        ),
        Pool("Where can I eat {food} in {city}?", "Find a restaurant in {city} with {food}.",
             "I am in {city} and want {food}.", "I want to eat {food} in {city}.",
             "Find a restaurant with {food} in {city}."),
        lambda dice: {"restaurant": w.brand(dice), "street": f"{w.brand(dice)} Street"},
    ),
    Function(
        "calculate", "Calculate an expression", (_string("expression", "", lambda dice: _expression(dice)),),
        Pool("Calculate {expression}", "What is {expression}?", "How much is {expression}?", "Work out {expression}.",
             "Calculate this: {expression}"),
        lambda dice: {"result": dice.number(0, 9999)},
    ),
)  # fmt: skip


def _query(dice: Dice) -> str:
    """Something to search for."""
    return dice.choose(
        (
            w.thing(dice),
            f"{dice.pick(w.THEMES)} in {w.town(dice)}",
            f"{w.full_name(dice)}",
            f"cheap {dice.pick(w.OBJECTS)}",
        )
    )


def _path(dice: Dice) -> str:
    """The name of a file, sometimes with a folder."""
    name = f"{dice.coin()}.{dice.choose(('txt', 'csv', 'md', 'json', 'log'))}"
    return f"{dice.coin(2)}/{name}" if dice.chance(1, 2) else name


def _expression(dice: Dice) -> str:
    """A calculation with two or three numbers."""
    numbers = [str(dice.number(2, 400)) for _ in range(dice.number(2, 3))]
    return dice.choose((" + ", " - ", " * ")).join(numbers)


_ADJECTIVE_NAMES = ("size", "level", "speed", "height", "width", "weight", "amount", "count", "price", "limit", "floor")
_TEXT_NAMES = ("label", "note", "model", "brand", "target", "group", "owner", "category", "source", "place", "tag")
_FLAG_NAMES = ("urgent", "silent", "loud", "fast", "public", "gift", "express", "safe", "dry", "new")


def renamed(dice: Dice, function: Function) -> Function:
    """A usual tool with another name and other names of parameters, which a model has to read instead of knowing."""
    what = function.name.partition("_")[2] or function.name
    first, *others = function.name.split("_")
    joined = first + "".join(other.capitalize() for other in others)
    name = dice.choose(
        (what, joined, f"look_up_{what}", f"{what}_{dice.coin(1)}", f"{dice.coin(2)}_{what}", dice.coin(2))
    )
    parameters = []
    for each in function.parameters:
        called = each.name
        if dice.chance(1, 3):
            called = dice.choose((f"the_{called}", f"{called}_{dice.coin(1)}", called.upper(), dice.coin(2)))
        parameters.append(replace(each, name=called, field=each.name))
    return replace(function, name=name, parameters=tuple(parameters), origin=function.name)


STYLES = Pool(
    "{p} {v}", "{p}: {v}", "{p} = {v}", "{v} for {p}", "{p} is {v}", "the {p} {v}", "{p} as {v}", "{p} of {v}",
    "{v} as {p}", "{v} as the {p}",
)  # fmt: skip


def invented(dice: Dice, taken: frozenset[str] = frozenset()) -> Function:
    """A tool that nobody has seen: a verb and a noun, with random parameters.

    taken: names that it must not have, in small letters without underscores.
    """
    while True:
        noun = dice.pick(w.OBJECTS) if dice.chance(1, 2) else dice.coin(2)
        verb = dice.pick(w.VERBS)
        name = f"{verb}_{noun}" if dice.chance(4, 5) else verb + noun.capitalize()
        if name.replace("_", "").lower() not in taken:
            break
    parameters = _parameters(dice, dice.number(1, 2 + (dice.level > 0)))
    what = f"{verb} the {noun}"
    style = dice.pick(STYLES)
    listed = [style.format(p=each.name, v=f"{{{each.name}}}") for each in parameters if each.asked]
    joined = listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    asks = Pool(
        f"{what.capitalize()} with {joined}.",
        f"Please {what}: {', '.join(listed)}.",
        f"Call {name} with {joined}.",
        f"I want to {what} with {joined}.",
        f"Please {what} with {joined}.",
    )
    results = dice.choose(("status", "id", "price", "result", "time"))

    def result(dice: Dice) -> dict[str, Any]:
        values = {"status": "ok", "id": dice.code(), "price": dice.number(1, 900), "result": dice.coin()}
        return {results: values.get(results, w.clock(dice))}

    return Function(name, f"{what.capitalize()}." if dice.chance(3, 4) else "", parameters, asks, result)


def _parameters(dice: Dice, count: int) -> tuple[Parameter, ...]:
    found: dict[str, Parameter] = {}
    while len(found) < count:
        each = _parameter(dice)
        found.setdefault(each.name, each)
    parameters = list(found.values())
    if dice.chance(1, 4):
        last = parameters.pop()
        # An optional parameter: the user names a value, or the call has none.
        parameters.append(replace(last, required=False, asked=not parameters or dice.chance(1, 2)))
    return tuple(parameters)


def _parameter(dice: Dice) -> Parameter:
    kind = dice.number(0, 9)
    if kind <= 2:
        name = dice.choose(_ADJECTIVE_NAMES) if dice.chance(3, 4) else dice.coin(2)
        return Parameter(name, INTEGER, f"The {name}" if dice.chance(1, 3) else "", integer(1, 500))
    if kind == 3:
        return Parameter(dice.choose(_ADJECTIVE_NAMES), NUMBER, "", decimal)
    if kind == 4:
        return Parameter(dice.choose(_FLAG_NAMES), BOOLEAN, "", lambda dice: dice.chance(1, 2))
    if kind == 5:
        options = dice.several(w.COLORS, 3)
        return Parameter("color", {"type": "string", "enum": options}, "", lambda dice: dice.choose(options))
    name = dice.choose(_TEXT_NAMES) if dice.chance(3, 4) else dice.coin(2)
    value = dice.choose((w.person, w.brand, w.town, lambda dice: dice.code(), lambda dice: dice.pick(w.OBJECTS)))
    return Parameter(name, STRING, f"The {name}" if dice.chance(1, 3) else "", value)

"""The words of the generated conversations. In each pool every fifth entry is held out (see dice.py)."""

from __future__ import annotations

from collections.abc import Sequence

from .dice import Dice, Pool, words

FIRST_NAMES = words(
    """Ann Tom Maria David Sofia James Emma Lucas Olivia Peter Julia Mark Clara Paul Nina Simon Laura Martin Alice
    George Hannah Daniel Eva Robert Sarah Oscar Lena Victor Ruth Adam Iris Felix Grace Hugo Ivy Jonas Kate Leo Mia Noah
    Petra Quinn Rosa Samuel Tina Umar Vera Walter Yara Zoe Amir Bella Carlos Dora Elias Fiona Gustav Helen Igor Jane
    Karim Lily Marco Nora Otto Paula Rafael Stella Theo Ursula Viktor Wendy Xavier Yusuf Zara Arthur Bianca Cyril Diana
    Edgar Freya Gabriel Heidi Ian Joan Kevin Linda Milan Nadia Omar Pia Ralph Susan Tara Uma Vince Wanda Boris Cora"""
)
CITIES = words(
    """Paris London Berlin Madrid Rome Tokyo Oslo Vienna Lisbon Dublin Prague Athens Cairo Delhi Lima Boston Chicago
    Sydney Toronto Warsaw Helsinki Geneva Milan Naples Porto Seattle Denver Austin Kyoto Seoul Hamburg Munich Lyon Nice
    Bergen Zurich Bern Basel Turin Bologna Seville Valencia Glasgow Leeds Bristol York Cork Antwerp Ghent Utrecht"""
)
COUNTRIES = words(
    """France Spain Italy Japan Norway Peru Egypt Brazil Canada India Kenya Chile Poland Greece Turkey Ireland Sweden
    Cuba Ghana Nepal Austria Mexico Iceland Portugal Vietnam"""
)
TOWN_ENDINGS = words("ford ton ville burg field mouth port bridge stead wick dale haven hill wood bury")
JOBS = words(
    """baker teacher doctor farmer painter nurse pilot cook driver writer singer builder lawyer gardener plumber dentist
    tailor sailor judge waiter barber potter miner actor banker carpenter chemist librarian mechanic photographer
    electrician engineer architect journalist musician florist butcher postman programmer translator"""
)
ANIMALS = words(
    """dog cat horse rabbit parrot goat turtle hamster duck pony sheep goose pigeon lizard donkey canary cow hen mouse
    frog snake ferret pig peacock owl"""
)
COLORS = words("red blue green yellow black white brown purple orange gray pink silver golden violet turquoise")
FOODS = words(
    """soup bread rice cheese pasta pizza salad fish apples pears grapes honey cake noodles potatoes beans carrots
    pancakes plums dumplings bananas tomatoes mushrooms cherries curry olives waffles lentils onions figs"""
)
HOBBIES = words(
    """chess sailing painting swimming running reading dancing fishing cycling gardening cooking knitting singing skiing
    climbing hiking tennis football pottery juggling photography archery yoga skating rowing"""
)
INSTRUMENTS = words(
    "piano violin guitar flute drums trumpet cello harp clarinet trombone banjo organ oboe ukulele tuba"
)
VEHICLES = words("bus train car bicycle tram ferry taxi scooter boat truck van helicopter ship motorbike subway")
MONTHS = words("January February March April May June July August September October November December")
DAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
OBJECTS = words(
    """lamp chair table clock book vase box basket mirror carpet radio camera guitar coat umbrella suitcase ladder
    bottle kettle blanket pillow hammer bucket candle drum helmet key knife map mug needle notebook oven pan pencil
    phone picture plate ring rope scarf shelf shovel sofa spoon statue telescope tent towel wallet"""
)
MATERIALS = words("wood glass steel paper cotton leather stone wool silver clay copper plastic brass silk bamboo")
ROOMS = words(
    """kitchen garage cellar attic bedroom bathroom garden hall office library barn shed balcony workshop pantry"""
)
ADJECTIVES = words("old small new big heavy broken round cheap clean rusty long light square dusty short")
EVENTS = words(
    """concert meeting festival market race lecture party exhibition workshop parade wedding film play tournament
    conference"""
)
WEATHER = words("sunny cloudy rainy windy foggy snowy stormy clear humid icy")
THEMES = words("music sports history travel science art food weather money health politics nature films books games")
VERBS = words(
    """order paint repair move clean sell rent measure check count open close lock send pack weigh wash store lift scan
    print sort label inspect register"""
)
ROLES = words(
    """guide assistant clerk librarian cook robot pilot teacher doctor guard tailor ranger captain trader coach"""
)


def person(dice: Dice) -> str:
    """A first name: a usual one or an invented one."""
    return dice.pick(FIRST_NAMES) if dice.chance(1, 2) else dice.coin().capitalize()


def full_name(dice: Dice) -> str:
    """A first name, sometimes with a family name."""
    return person(dice) if dice.chance(3, 4) else f"{person(dice)} {dice.coin().capitalize()}"


def town(dice: Dice) -> str:
    """A city, or an invented town."""
    if dice.chance(1, 3):
        return dice.pick(CITIES)
    return (dice.coin(1 if dice.chance(1, 2) else 2) + dice.pick(TOWN_ENDINGS)).capitalize()


def brand(dice: Dice) -> str:
    """An invented name of a company, a ship or a river."""
    return dice.coin().capitalize()


def thing(dice: Dice) -> str:
    """An object with an adjective or a color."""
    return f"{dice.pick(dice.choose((ADJECTIVES, COLORS)))} {dice.pick(OBJECTS)}"


def plural(noun: str) -> str:
    """The plural of one of the objects."""
    if noun == "knife":
        return "knives"
    if noun in ("shelf", "scarf"):
        return noun[:-1] + "ves"
    return noun + ("es" if noun.endswith("x") else "s")


def clock(dice: Dice) -> str:
    """A time of day such as "14:30"."""
    return f"{dice.number(6, 22)}:{dice.choose(('00', '15', '30', '45'))}"


def date(dice: Dice) -> str:
    """A date such as "2025-03-14"."""
    return f"{dice.number(2020, 2035)}-{dice.number(1, 12):02}-{dice.number(1, 28):02}"


def email(dice: Dice) -> str:
    """An address of an invented person."""
    return f"{dice.coin(2)}@{dice.coin(2)}.{dice.choose(('com', 'org', 'net'))}"


SHORT_TEXTS: Pool[Sequence[str]] = Pool(
    ("I will be late.", "See you soon.", "The meeting is over.", "Please call me back.", "Dinner is ready."),
    ("The train has left.", "We won the game.", "Bring your coat.", "The door is open.", "I am at home."),
    ("Happy birthday!", "Thank you for the cake.", "The shop is closed.", "It is raining here.", "Are you well?"),
    ("The key is under the mat.", "I found your book.", "We need more bread.", "The car is fixed.", "Good luck!"),
    ("The bus is late.", "Please bring the book.", "Dinner is over.", "I found your coat.", "We need the car."),
)


def short_text(dice: Dice) -> str:
    """A sentence that somebody might send."""
    return dice.choose(dice.pick(SHORT_TEXTS))


_SHORTER = (("What is ", "What's "), ("Who is ", "Who's "), ("Where is ", "Where's "), ("I am ", "I'm "))


def casual(dice: Dice, question: str) -> str:
    """The question as some people type it: with a contraction, or without the question mark."""
    if dice.chance(5, 6):
        return question
    for long, short in _SHORTER:
        if question.startswith(long):
            question = short + question[len(long) :]
    return question.removesuffix("?") if dice.chance(1, 2) else question

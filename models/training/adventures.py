"""Plots that lead the hero out: something lost, a chain of swaps, a rescue, a race.

A plot casts its roles first and names them again where the effect comes: what was lost is what is found, who was
afraid is who turns out brave. Pronouns are used only where one character can be meant.
"""

from __future__ import annotations

from .lexicon import (
    FLOATING,
    FOODS,
    HEAVY,
    HIDDEN,
    LIGHT,
    PLACES,
    PRIZES,
    ROUND,
    SKILLS,
    TREASURES,
    WATERS,
    capital,
)
from .parts import ask, day, goodbye, meeting, opening, scenery, thanks
from .telling import Telling

# What went wrong, what makes it hopeless for the hero, and how the helper puts it right.
LOSSES = {
    "fly": (
        LIGHT,
        (
            "Suddenly a strong wind blew {o.the} up into a tall tree.",
            "A gust of wind took {o.the} and carried it to the top of a tree.",
            "Whoosh! The wind grabbed {o.the}, and it landed on top of a high wall.",
            "The wind pulled {o.the} away, and it got stuck high up on a roof.",
        ),
        (
            "{h} jumped, but it was much too high.",
            "{h} stood on a box, but it was still too high.",
            "{h} threw small stones at it, but they did not reach it.",
        ),
        (
            "{f.N} flew up and came back with {o.the}.",
            "Three times {f} flew around it, and then {f} picked up {o.the} and brought it down.",
            "{f.N} spread two strong wings, flew up high, and brought down {o.the}.",
        ),
    ),
    "climb": (
        LIGHT,
        (
            "Suddenly the wind blew {o.the} into a tall tree.",
            "The wind lifted {o.the} up, and it got caught in the branches of a tree.",
        ),
        (
            "{h} tried to climb the tree, but slipped down again.",
            "{h} looked for a ladder, but there was none.",
            "{h} shook the tree, but nothing fell down.",
        ),
        (
            "{f.N} climbed from branch to branch and came back with {o.the}.",
            "Quick as a flash, {f} climbed up and threw down {o.the}.",
            "{f.N} ran up the tree and let {o.the} drop into {h.his} arms.",
        ),
    ),
    "swim": (
        FLOATING,
        (
            "Then {h} slipped, and {o.the} fell into the water.",
            "But {h.he} came too close to the water, and {o.the} fell in and floated away.",
            "A big wave came and pulled {o.the} out into the water.",
        ),
        (
            "{h} could not swim, so {h.he} could only watch.",
            "{h} threw a rope after it, but the rope missed.",
            "{h} reached for it with a stick, but the stick was too short.",
        ),
        (
            "{f.N} jumped into the water, swam out, and pushed {o.the} back to the shore.",
            "With a big splash, {f} swam after {o.the} and brought it back.",
            "{f.N} dived under the waves and came up again with {o.the}.",
        ),
    ),
    "squeeze": (
        ROUND,
        (
            "Then {o.the} rolled away and fell into a narrow hole.",
            "{h} stumbled, and {o.the} rolled under a big stone.",
            "But {h.he} dropped {o.the}, and it rolled into a crack between two rocks.",
        ),
        (
            "{h} reached in, but the hole was too deep.",
            "{h} tried it with a long stick, but the stick broke.",
            "{h} tried to reach it, but it was too far inside.",
        ),
        (
            "{f.N} crawled inside and came back with {o.the}.",
            "{f.N} dug a little tunnel and rolled {o.the} out into the light.",
            "{f.N} was thin enough to slip in, and soon pushed {o.the} out again.",
        ),
    ),
    "lift": (
        HEAVY,
        (
            "Then a heavy branch broke and fell right on top of {o.the}.",
            "Suddenly a big rock rolled down and trapped {o.the}.",
            "There was a loud crash, and {o.the} was caught under an old tree.",
        ),
        (
            "{h} pushed and pulled, but it was too heavy.",
            "{h} pushed until {h.his} arms hurt, but nothing moved.",
            "{h} tried to move it, but {h.he} was not strong enough.",
        ),
        (
            "{f.N} took a deep breath and lifted it, and {h} pulled out {o.the}.",
            "{f.N} pushed it aside with one strong push, and there was {o.the}, safe and sound.",
        ),
    ),
    "smell": (
        HIDDEN,
        (
            "But when {h} wanted to go home, {o.the} was gone.",
            "When {h} looked around, {o.the} was nowhere to be seen.",
            "Then {h} put a hand in {h.his} bag and found that {o.the} was missing.",
        ),
        (
            "{h} looked under every stone, but could not find it.",
            "{h} went back the whole way, but found nothing.",
            "{h} looked everywhere until it was almost dark.",
        ),
        (
            "{f.N} sniffed at {h.his} bag, followed the smell, and found {o.the} in the tall grass.",
            "{f.N} put a nose to the ground, ran left and right, and soon found {o.the} under a bush.",
        ),
    ),
}


def lost(t: Telling) -> None:
    """The hero loses something in a way that calls for a skill; someone with that skill gets it back."""
    hero = t.hero()
    skill = t.draw.choose([skill for skill in LOSSES if hero.noun not in SKILLS[skill]])
    nouns, accidents, failures, rescues = LOSSES[skill]
    t.thing("o", nouns)
    t.pick("p", WATERS if skill == "swim" else PLACES)
    if t.draw.chance(1, 3):
        day(
            t,
            "One {weather} {part}, {h.called} went {p.to}.",
            "One {weather} {part}, {h.called} was walking {p.at}.",
            "It was a {weather} {part}, and {h.called} was playing {p.at}.",
        )
    else:
        opening(t)
        day(
            t,
            "One {weather} {part}, {h} went {p.to}.",
            "One {weather} {part}, {h} was walking {p.at}.",
            "One {weather} {part}, {h} was playing {p.at}.",
            "It was a {weather} {part}, and {h} was alone {p.at}.",
            "On a {weather} {part}, {h} set out for {p.the}.",
        )
    t.tell(
        "{h.He} had brought {h.his} favorite thing, {o.a}.",
        "{h.He} carried {o.a}, a present from {h.his} best friend.",
        "{h.He} had {o.a} and was very proud of it.",
        "{h.He} never went anywhere without {h.his} {o}.",
        "In {h.his} bag was {o.a} that {h.he} had found in the attic.",
        "{h.He} wanted to show {o.a} to everyone.",
    )
    scenery(t)
    t.tell(*accidents)
    t.tell(*failures)
    t.tell(
        "{h.He} felt very sad.",
        '"What shall I do now?" {h.he} sighed.',
        "{h.His} eyes filled with tears.",
        "{h.He} sat down and began to cry.",
        '"Oh no, my {o.n}!" {h.he} cried.',
    )
    t.paragraph()
    t.helper(skill)
    ask(t, "I lost my {o}, and I cannot get it back,")
    t.tell(
        '"I know what to do," said {f}.',
        '"That is easy for me," said {f}.',
        '"Dry your tears," said {f}. "I will try."',
        '"Do not worry, I can help," said {f}.',
        '"Wait here," said {f} with a smile.',
    )
    t.tell(*rescues)
    t.paragraph()
    thanks(t)
    goodbye(
        t,
        "After that, {h} always took good care of {o.the}.",
        "{h} held {o.the} tight all the way home.",
        "That night, {o.the} lay safely next to {h.his} bed.",
        "Now {h} knew that it is good to ask for help.",
    )


def trade(t: Telling) -> None:
    """The hero wants something and gets it through a chain of swaps: each owner needs what the next one has."""
    t.hero(robot=False)
    t.thing("o", TREASURES)
    t.pick_other("y", FOODS, t.pick("x", FOODS))
    t.cast["Y"] = capital(t.cast["y"])
    t.friend("f")
    t.friend("g")
    t.pick_other("q", PLACES, t.pick("p", PLACES))
    if t.draw.chance(1, 3):
        day(
            t,
            "One {weather} {part}, {h.called} met {f.called} {p.at}. {f.N} was playing with {o.a}.",
            "One {weather} {part}, {h.called} was walking {p.at} and saw {f.called} with {o.a}.",
        )
        t.tell("{h} liked it at once.", "{h} had never seen such a fine {o.n}.", "Oh, how {h} wished to have it!")
    else:
        opening(t)
        t.tell(
            "More than anything, {h} wanted {o.a}.",
            "Every night {h} dreamed of {o.a}.",
            "For a long time {h} had wished for {o.a}.",
        )
        t.tell(
            "One day, {h.he} saw that {f.called} had one {p.at}.",
            "Then {h.he} met {f.called} {p.at}, and {f} had just such a {o.n}.",
        )
    t.tell(
        '"May I have {o.the}?" asked {h}.',
        '"That is a wonderful {o.n}," said {h}. "Can I have it?"',
        '"Would you give me your {o}?" {h} asked.',
    )
    t.tell(
        '"Yes, if you bring me some {x}," said {f}. "I am so hungry!"',
        '"I will swap it for some {x}," said {f}.',
        '"I would rather have {x} than {o.a}," said {f}. "Let us swap."',
        '"Bring me {x}, and it is yours," {f} answered.',
    )
    t.paragraph()
    t.tell(
        "But {h} had no {x}. So {h.he} went {q.to}, where {g.called} lived.",
        "{h} had no {x}, but {g.called} {q.at} had plenty.",
        "Where could {h} get {x}? Perhaps {q.at}, where {g.called} had a little shop.",
    )
    t.tell(
        '"Could I have some {x}, please?" asked {h}.',
        '"I need some {x} for {f}," said {h}. "Can you help me?"',
        '"Please, may I have some {x}?" {h} asked.',
    )
    t.tell(
        '"Gladly, but I would like some {y} for it," said {g}.',
        '"Of course," said {g}. "But first bring me some {y}."',
        '"If you give me some {y}, you can have it all," said {g}.',
    )
    t.tell(
        "{Y}! That was what {h} had in {h.his} bag for lunch.",
        "{h} smiled, because the kitchen at home was full of {y}.",
        "{h} ran home, asked for some {y}, and came back at once.",
    )
    scenery(t)
    t.tell(
        "So {h} gave {g} the {y} and got the {x}.",
        '"I have brought you {y}," said {h}, and {g} filled a bag with {x}.',
        "{g.N} took the {y} and gave {h} the {x}.",
    )
    t.tell(
        "Then {h} carried the {x} to {f}, and {f} handed over {o.the}.",
        '"I have the {x}!" called {h}. "And I have {o.a} for you," said {f}.',
        "{h} brought the {x} to {f}. {f.N} ate with joy and gave {h} {o.the}.",
    )
    t.paragraph()
    t.tell(
        "Now everybody had what they wanted.",
        '"What a good day," said {h}. "We are all happy now."',
        '"Now I have {o.a}, and I have two new friends," said {h}.',
    )
    goodbye(
        t,
        "{h} let {f} and {g} play with {o.the}, too.",
        "{h} took {o.the} home and showed it to everyone.",
        "And {h} shared {o.the} with everyone who asked.",
    )


# Fear, who does not have it, how a friend gets into trouble there, what helps, and how it is used.
FEARS = (
    (
        "the dark",
        ("owl", "mouse", "cat"),
        ("fallen asleep in a deep, dark cave", "lost the way in the dark woods", "got stuck in a dark old barn"),
        "a lantern",
        ("lit the lantern and walked into the dark", "held up the lantern and went on, step by step"),
    ),
    (
        "deep water",
        ("duck", "frog", "turtle"),
        ("got stuck on a rock in the river", "drifted away on a log in the lake"),
        "a boat",
        ("climbed into the boat and began to row", "pushed the boat into the water and rowed with all might"),
    ),
    (
        "high places",
        ("owl", "squirrel", "duck", "dragon", "cat"),
        ("got stuck at the top of a tall tree", "climbed an old tower and could not get down"),
        "a ladder",
        (
            "set up the ladder and climbed up, without looking down",
            "leaned the ladder up and climbed higher and higher",
        ),
    ),
    (
        "thunder",
        (),
        ("hurt a foot out there in the storm", "lost the way home in the storm"),
        "an umbrella",
        (
            "opened the umbrella and ran out into the storm",
            "held up the umbrella and walked through the rain and the noise",
        ),
    ),
)


def brave(t: Telling) -> None:
    """The hero is afraid of something, and a friend's trouble lies exactly there."""
    hero, friend = t.hero(), t.friend()
    t.friend("g")
    fears = [fear for fear in FEARS if hero.noun not in fear[1] and friend.noun not in fear[1]]
    fear, _, troubles, tool, deeds = t.draw.choose(fears)
    t.cast.update(fear=fear, tool=tool, trouble=t.draw.choose(troubles), deed=t.draw.choose(deeds))
    meeting(t)
    t.tell(
        "But {h} had a secret. {h.He} was afraid of {fear}.",
        "There was only one thing that {h} was afraid of, and that was {fear}.",
        "{h} was afraid of {fear}, and {f} knew it.",
    )
    t.maybe('"I wish I were brave," {h} often said.', "Nobody laughed about it, but {h} was ashamed.")
    t.tell(
        "One evening, {g.called} came running.",
        "One day, {g.called} knocked at the door.",
        "Late one day, {h} heard {g.called} calling.",
    )
    t.tell(
        '"Come quickly!" cried {g}. "{f.N} has {trouble}!"',
        '"Help!" cried {g}. "{f.N} has {trouble}, and nobody else is near!"',
    )
    t.paragraph()
    t.tell(
        "{h} began to shake. {h.He} thought of {fear}. Then {h.he} thought of {f}.",
        "{h} felt cold with fear. But a friend in need cannot wait.",
        "{h} wanted to hide. But {f} needed help, and that was more important.",
        '"I am afraid," said {h}, "but {f} is my friend."',
    )
    t.tell(
        "{h} found {tool} and hurried there with {g}.",
        "{h} ran to get {tool}, and {g} showed the way.",
        "{g.N} had brought {tool}, and they set off at once.",
    )
    t.tell("With a beating heart, {h} {deed}.", "{h} took a deep breath. Then {h.he} {deed}.", "Slowly, {h} {deed}.")
    t.tell(
        '"{f.call}, I am coming!" {h.he} called.',
        '"Hold on, I am almost there!" {h.he} shouted.',
        '"Do not be afraid, {f.call}!" {h.he} called.',
    )
    t.tell(
        "At last {h.he} reached {f} and brought {f.him} back safely.",
        "Soon {h} held {f} tight, and together they found the way back.",
        "There was {f}, cold and tired. {h} took {f.him} home.",
    )
    t.paragraph()
    t.tell(
        '"You were so brave," said {f}. "Were you not afraid of {fear}?"',
        '"You came all the way to me," said {f}. "What about {fear}?"',
        '"You saved me!" said {f}. "And you are afraid of {fear}!"',
    )
    t.tell(
        '"I was," said {h}, "but I was more afraid of losing you."',
        '"I forgot to be afraid," said {h}, and {g} laughed.',
        '"Yes," said {h}, "but you needed me."',
    )
    goodbye(
        t,
        "After that day, {h} was never afraid of {fear} again.",
        "Now {h} always keeps {tool} at home, just in case.",
        "{h} was still a little afraid of {fear}, but now {h.he} knew how to be brave.",
    )


MISHAPS = (
    ("fell into a muddy ditch", "pulled {f} out with a rope"),
    ("tripped over a root and hurt a knee", "tied a cloth around the knee"),
    ("got caught in a thorny bush", "bent the thorny branches away"),
    ("took the wrong way and landed in a swamp", "held out a long branch and pulled {f} out"),
)


def race(t: Telling) -> None:
    """A boaster challenges the hero; the boaster has a mishap, and the hero stops to help."""
    t.hero()
    t.friend()
    t.friend("g")
    t.thing("o", PRIZES)
    t.pick_other("q", PLACES, t.pick("p", PLACES))
    if t.draw.chance(1, 3):
        day(
            t,
            "One {weather} {part}, {h.called} met {f.called} who liked to boast.",
            "One {weather} {part}, {h.called} heard {f.called} boast.",
        )
    else:
        opening(t)
        t.tell(
            "Not far away lived {f.called}, who liked to boast.",
            "{h} knew {f.called}, who was very fast and very proud.",
            "In the next house lived {f.called}, who always wanted to be first.",
        )
    t.tell(
        '"Nobody is faster than me," said {f} proudly.',
        '"You will never catch me, {h}," said {f} with a grin.',
        '"I am the fastest of all!" said {f}. "You are as slow as a snail, {h}."',
    )
    t.tell(
        '"Then let us have a race," said {h}.',
        '"Are you sure?" asked {h}. "Let us run and see."',
        '"We will see," said {h}. "Let us race."',
    )
    t.tell(
        "They wanted to run from {p.the} to {q.the}. The prize was {o.a}.",
        "The winner would get {o.a}. The way went from {p.the} to {q.the}.",
    )
    t.paragraph()
    scenery(t)
    t.tell('"Ready, set, go!" called {g.called}.', '"One, two, three, go!" shouted {g.called}.')
    t.tell(
        "{f.N} was soon far ahead and laughed at {h}.",
        "They ran side by side, but then {f} pushed past {h}.",
        "{f.N} ran off like the wind, and {h} was left behind.",
        "At first {h} was ahead, but then {f} went past with a loud laugh.",
    )
    mishap, help_ = t.draw.choose(MISHAPS)
    t.cast.update(mishap=mishap, help=help_.format_map(t.cast))
    t.tell("But {f} did not look ahead. {f.N} {mishap}.", "But halfway there, {f} {mishap}.")
    t.tell('"Help me!" cried {f}.', '"Oh no! Somebody help me!" shouted {f}.', '"Ouch! Please help!" cried {f}.')
    t.tell(
        "{h} could have won now. But {h.he} stopped at once.",
        '"If I stop, I will lose," thought {h}. Still, {h.he} stopped.',
        "{h} did not think of {o.the} any more and ran to help.",
    )
    t.tell("{h} {help}.", "Quickly {h} {help}.")
    t.paragraph()
    t.tell(
        '"Why did you stop?" asked {f}. "You could have won {o.the}."',
        '"You are slow, but you are kind," said {f}. "Thank you, {h}."',
        '"I laughed at you, and you helped me," said {f}. "I am sorry."',
    )
    t.tell(
        '"You are more important than a race," said {h}.',
        '"Anybody would have stopped," said {h}.',
        '"A {o.n} cannot laugh with me, but you can," said {h}.',
    )
    t.tell(
        "Side by side, they walked {q.to}.",
        "Then {f} leaned on {h}, and step by step they went {q.to}.",
        "Then {h} waited for {f}, and they reached {q.the} together.",
    )
    t.tell(
        '"You both win," said {g}, and gave them {o.the}.',
        'But {g} had seen it all and gave {o.the} to {h}. "You have the biggest heart," said {g}.',
        '"{h} is the true winner," said {f}, and {g} gave {o.the} to {h}.',
    )
    goodbye(
        t,
        "{f.N} never boasted again.",
        "{h} put {o.the} where everyone could see it.",
        "After that, they often ran together, just for fun.",
    )

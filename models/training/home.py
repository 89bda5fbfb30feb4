"""Plots near home: sharing, a strange sound, a birthday, a lie, a seed.

A plot casts its roles first and names them again where the effect comes: what was lost is what is found, who was
afraid is who turns out brave. Pronouns are used only where one character can be meant.
"""

from __future__ import annotations

from .lexicon import (
    BREAKABLE,
    PLACES,
    SEASONS,
    TREASURES,
    article,
)
from .parts import goodbye, meeting, opening, scenery
from .telling import Telling


def share(t: Telling) -> None:
    """Two friends want the same thing, break it by pulling, and learn to share by mending it."""
    t.hero()
    t.friend()
    t.thing("o", TREASURES)
    meeting(t)
    t.pick("p", PLACES)
    t.tell(
        "One day, they found {o.a} {p.at}.",
        "One morning, they saw {o.a} lying {p.at}.",
        "One afternoon, as they played {p.at}, they discovered {o.a}.",
    )
    t.tell(
        "It was just what {h} had always wanted, and {f} wanted it, too.",
        "Their eyes grew big, for neither of them had ever had {o.a}.",
        "Both of them ran to it as fast as they could.",
    )
    t.tell(
        '"It is mine! I saw it first!" cried {h}.',
        '"Give it to me, it is mine!" shouted {h}.',
        '"Let go!" cried {h}. "I found it!"',
        '"I want it," said {h}, and took hold of it.',
    )
    t.tell(
        '"No, it is mine!" said {f}.',
        '"That is not fair. I want it, too!" said {f}.',
        '"But I touched it first!" said {f}.',
    )
    t.tell(
        "They pulled and pulled, until {o.the} broke in two.",
        "{h} pulled on one side and {f} on the other. Crack! {o.The} was broken.",
        "They both pulled hard, and {o.the} fell to the ground and broke.",
    )
    t.paragraph()
    t.tell(
        "Now nobody could play with {o.the}.",
        "It was suddenly very quiet. Both of them had tears in their eyes.",
        "They looked at the pieces and were very quiet.",
        "{h} was angry and went home, and {f} went home, too.",
    )
    t.tell(
        '"I am sorry," said {h} at last. "It was my fault."',
        'The next day, {h} said to {f}, "I miss you. I am sorry."',
        'Then {f} said, "I am sorry. You are more important than any {o.n}."',
    )
    t.tell(
        '"Let us mend it together," said {f}.',
        '"Come, we can make it whole again," said {f}.',
        '"Maybe we can fix it," {f} said.',
    )
    t.tell(
        "{h} held the pieces, and {f} put the glue on.",
        "{f.N} brought some glue, and {h} brought some string.",
        "{h} found a hammer, and {f} found some nails.",
    )
    t.tell(
        "They worked all day, and in the evening {o.the} was as good as new.",
        "Soon {o.the} looked almost like new.",
        "It took a long time, but at last {o.the} was whole again.",
    )
    t.paragraph()
    t.tell(
        '"You can have it first," said {h}. "No, you first," said {f}, and they both laughed.',
        "From then on, {h} had {o.the} on one day, and {f} had it on the next.",
        '"It is ours," said {h}. "Yes, ours," said {f}.',
    )
    goodbye(
        t,
        "They had learned that it is more fun to share.",
        "And {o.the}? It never broke again.",
        "{h} and {f} never fought about {o.the} again.",
    )


SOUNDS = (
    ("a soft crying", "its foot was caught under a root", "lifted the root with a stick"),
    ("a strange scratching", "it was trapped in an old box", "opened the box"),
    ("a sad little song", "it had lost its family", "called out until its family came running"),
    ("a quiet sneeze", "it was wet and very cold", "wrapped it in a warm blanket"),
    ("a loud rumble", "its empty belly was making the noise", "gave it something to eat"),
)
BABIES = ("baby rabbit", "baby owl", "baby deer", "baby bear", "kitten", "puppy", "baby dragon", "baby goat")


def sound(t: Telling) -> None:
    """A strange sound frightens everyone; the hero follows it and finds somebody small in need."""
    t.hero()
    t.friend()
    noise, cause, deed = t.draw.choose(SOUNDS)
    t.cast.update(noise=noise, cause=cause, deed=deed, the_noise="the " + noise.split(" ", 1)[1])
    t.pick("b", [baby for baby in BABIES if t.cast["h"].noun not in baby and t.cast["f"].noun not in baby])
    opening(t)
    t.pick("p", PLACES)
    t.pick("season", SEASONS)
    t.pick("guess", ("ghost", "monster", "witch", "wolf", "giant", "troll"))
    t.tell(
        "One {season} night, {h} woke up and heard {noise}. It came from {p.the}.",
        "One {season} evening, there was {noise} {p.at}.",
        "Late one {season} night, {h} heard {noise} outside. Again and again it came from {p.the}.",
        "It was a dark {season} night. Suddenly {h} heard {noise}, and it came from {p.the}.",
        "In {season}, {h} heard {noise} {p.at} for three nights in a row.",
    )
    t.tell(
        '"What can it be?" {h.he} wondered.', '"What a strange sound," thought {h}.', '"Who is there?" {h} whispered.'
    )
    t.paragraph()
    t.tell(
        "In the morning, {h} told {f.called} about it.",
        "{h} woke up {h.his} friend, {f.called}.",
        "{h} ran to the house of {f.called}.",
    )
    t.tell(
        '"I heard it, too," said {f}. "I think it is a {guess}."',
        '"Do not go there," said {f}. "It could be a {guess}!"',
        '"I am scared," said {f}. "There must be a {guess} outside."',
    )
    t.tell(
        '"I want to know," said {h}. "Will you come with me?"',
        '"Maybe somebody needs help," said {h}. "Let us look together."',
        '"There are no such things," said {h}. "Come with me and see."',
    )
    t.tell(
        "So they went {p.to}, side by side.",
        "They held hands and walked {p.to}, very slowly.",
        "{f.N} nodded, and so they tiptoed {p.to}.",
    )
    t.paragraph()
    t.tell(
        "There was no {guess} at all. It was only a {b}, and {cause}.",
        "Behind a bush sat a {b}, and not a {guess}. It looked very sad, for {cause}.",
    )
    t.tell("{h} {deed}, and {the_noise} stopped.", "At once {h} {deed}.", "While {f} spoke softly to it, {h} {deed}.")
    t.tell(
        '"Thank you," said the {b}.',
        '"You are so kind," whispered the {b}.',
        "The {b} looked up and smiled.",
        "The {b} jumped for joy.",
    )
    t.maybe('"And I thought you were a {guess}!" laughed {f}.', '"You are much smaller than a {guess}," said {f}.')
    goodbye(
        t,
        "Every {season} after that, the {b} came to visit {h}.",
        "{h} was glad that {h.he} had followed {the_noise}.",
        "Now, when there is a strange sound at night, {h} is not afraid.",
        "The {b} became the third friend of {h} and {f}.",
    )


LIKINGS = (
    ("{f} often felt cold in the evening", ("scarf", "blanket", "hat")),
    ("{f} loved music", ("flute", "bell", "music box")),
    ("{f} was afraid at night", ("lantern",)),
    ("{f} liked to read", ("book",)),
    ("{f} liked to pick flowers", ("basket", "vase")),
    ("{f} loved pretty things", ("ring", "hat", "scarf")),
)
GIFTS = tuple(noun for _, nouns in LIKINGS for noun in nouns)


def gift(t: Telling) -> None:
    """A friend's birthday: one idea fails, the next one works, and it is remembered why."""
    t.hero()
    t.friend()
    t.thing("x", [noun for noun in TREASURES if noun not in GIFTS])
    meeting(t)
    t.pick("soon", ("the next day", "on Sunday", "in three days"))
    t.maybe(
        "They shared their food and their secrets.",
        "They had never had a fight.",
        "They met every day after breakfast.",
    )
    t.tell(
        "It was {f}'s birthday {soon}, and {h} had no present yet.",
        "{f.N} had a birthday {soon}. {h} wanted to find the best present of all.",
        "{h} knew that {f} had a birthday {soon}, and {h.he} wanted to give {f.him} something special.",
    )
    t.tell(
        "First, {h} wanted to buy {x.a} at the market.",
        "In a shop window, {h} saw {x.a}.",
        '"I will buy {x.a}," thought {h}.',
    )
    t.tell(
        "But {x.the} cost too much, and {h} had only three coins.",
        "But when {h.he} came to the shop, {x.the} was already sold.",
        "But then {h} remembered that {f} already had one.",
    )
    t.paragraph()
    reason, nouns = t.draw.choose(LIKINGS)
    t.thing("o", nouns)
    t.cast["reason"] = reason.format_map(t.cast)
    t.tell(
        "Then {h} remembered that {reason}.",
        "{h} sat down to think. What did {f} like? Yes, {reason}!",
        "On the way home, {h} had an idea, because {reason}.",
    )
    t.tell(
        '"I will make {o.a} myself," said {h}.',
        '"I know what to make!" said {h}. "It must be {o.a}."',
        "So {h} decided to make {o.a}.",
        '"{f.N} needs {o.a}!" {h} cried.',
    )
    t.friend("g")
    t.tell(
        "It was hard work, but {g.called} helped with it.",
        "A neighbor, {g.called}, showed {h.him} how to do it.",
        "All night {h} worked, and {g.called} held the light.",
    )
    t.tell(
        '"It is beautiful," said {g} when {o.the} was done.',
        '"I have never seen such a fine {o.n}," said {g}.',
        '"{f.N} will love it," said {g}.',
    )
    t.paragraph()
    t.tell(
        "At the party, {h} gave {f} {o.the}.",
        "When the day came, {h} put {o.the} into a box and took it to {f}.",
        "At the party, {f} opened the box and found {o.the}.",
    )
    t.tell(
        '"How did you know?" cried {f}. "It is just what I needed!"',
        '"This is the best present ever," said {f}.',
        '"Is {o.the} really for me?" asked {f}. "It is wonderful!"',
        "{f.N} smiled from ear to ear.",
    )
    t.tell(
        '"I made it for you," said {h}.',
        '"{g.N} helped me," said {h}.',
        "{h} was even happier than {f}.",
    )
    goodbye(
        t,
        "It was much better than {x.a}.",
        "{f.N} kept {o.the} for many years.",
        "They ate cake and sang until the moon came up.",
    )


def truth(t: Telling) -> None:
    """The hero breaks something, hides it, feels bad, and tells the truth."""
    t.hero(robot=False)
    t.thing("o", BREAKABLE)
    t.pick("g", ("mother", "father", "grandmother", "grandfather", "aunt", "uncle"))
    opening(t)
    t.tell(
        "{h.His} {g} had {o.a} and loved it very much.",
        "In the kitchen stood {o.a}. It belonged to {h.his} {g}.",
        "On the shelf, {h.his} {g} kept {o.a}.",
    )
    t.tell(
        "One day, {h} was running through the house and bumped into the shelf.",
        "One rainy day, {h} threw a ball in the house.",
        "One evening, {h} was dancing on a chair and slipped.",
    )
    t.tell(
        "Crash! {o.The} fell down and broke.",
        "There was a crash, and {o.the} lay on the floor in pieces.",
        "{o.The} fell to the floor and broke into many pieces.",
    )
    t.pick("spot", ("under the bed", "behind the door", "under a rug", "behind the stove", "under the stairs"))
    t.tell("{h} was frightened and hid the pieces {spot}.", "Quickly {h.he} hid the pieces {spot}.")
    t.paragraph()
    t.tell(
        '"Have you seen my {o}?" asked {h.his} {g}.',
        'In the evening, {h.his} {g} looked for {o.the} and could not find it. "Where can it be?"',
        'At dinner, {h.his} {g} asked, "Where is my {o}?"',
    )
    t.tell(
        '"No," said {h}, and looked at the floor.',
        '"I do not know," {h} said very quietly.',
        '"Maybe the wind took it," said {h}.',
    )
    t.tell(
        "But the lie felt like a stone in {h.his} belly.",
        "That night, {h} could not sleep.",
        "All day long, {h} could think of nothing else.",
        "After that, nothing was fun any more, and even the food tasted bad.",
    )
    t.friend()
    t.tell(
        "{h} told {f.called} about it.",
        "On the way to school, {h} told everything to {f.called}.",
        "{h} went to see {h.his} friend, {f.called}.",
    )
    t.tell(
        '"Tell the truth," said {f}. "Then you will feel better."',
        '"A lie only grows," said {f}. "Go and say that you are sorry."',
        '"I once did the same," said {f}. "It helped to tell it."',
    )
    t.paragraph()
    t.tell(
        "So {h} took the pieces from {spot} and went to {h.his} {g}.",
        "{h} went home and brought the pieces to {h.his} {g}.",
    )
    t.tell(
        '"I broke {o.the}, and I hid the pieces," {h.he} said. "I am so sorry."',
        '"It was me," said {h}. "I broke your {o}, and then I lied."',
        '"I have to tell you something," said {h}. "I broke {o.the}."',
    )
    t.tell(
        'There was a long silence. Then {h.his} {g} gave {h.him} a hug. "Thank you for telling me," said {h.his} {g}.',
        '"I am sad about the {o.n}," said {h.his} {g}, "but I am glad that you told the truth."',
    )
    t.tell(
        "Together they glued the pieces, and {o.the} stood on the shelf again.",
        "{h} saved all {h.his} coins and bought a new {o.n}.",
        "Then they mended {o.the} together.",
    )
    t.tell(
        "That night, {h} slept very well.",
        "{h} never lied to {h.his} {g} again.",
        "The next day, {h} thanked {f} for the good advice.",
        "{h.His} heart was light again.",
        "You can still see the cracks, but nobody minds.",
    )
    t.maybe("The end.")


PLANTS = (
    ("sunflower", "as tall as a house"),
    ("pumpkin", "as big as a barrel"),
    ("rose bush", "full of red roses"),
    ("bean plant", "full of beans"),
    ("apple tree", "covered with white flowers"),
    ("strawberry plant", "full of red berries"),
)
WORRIES = (
    ("Then the rain stayed away, and the ground became dry.", "carried water from the well, again and again"),
    ("Then a cold night came, with ice on the grass.", "covered the place with warm straw"),
    ("Then hungry birds came and began to pick at the ground.", "put up a scarecrow with a funny hat"),
)


def garden(t: Telling) -> None:
    """The hero plants a seed, almost gives up, and patience (with help) is rewarded."""
    t.hero()
    t.friend()
    opening(t)
    t.pick("p", ("behind the house", "in the garden", "next to the fence", "under the window"))
    plant, grown = t.draw.choose(PLANTS)
    t.cast.update(plant=plant, grown=grown, a_plant=article(plant))
    t.tell(
        "One spring day, {f.called} gave {h} a tiny seed.",
        "In spring, {h} got a tiny seed from {f.called}.",
        "One spring morning, {h} met {f.called}, who had a bag of seeds. {h} got one of them.",
    )
    t.tell(
        '"If you wait, it will be a big {plant}," said {f}.',
        '"There is {a_plant} asleep in it," said {f}. "Give it water every day."',
    )
    t.tell(
        "{h} planted the seed {p}.",
        "{h} found a good place {p} and put the seed into the ground.",
        "So {h} made a little hole {p} and put the seed in.",
    )
    scenery(t)
    t.paragraph()
    t.tell(
        "Every morning {h} gave it water. But nothing happened.",
        "{h} looked at the ground every day. There was nothing to see.",
        "A week went by, and then another, but no {plant} came up.",
    )
    t.tell(
        '"It does not work," said {h}. "I will never have {a_plant}."',
        '"Maybe my seed is broken," sighed {h}.',
        '"How long must I wait?" asked {h}. "I see nothing at all."',
        "{h} was angry and wanted to dig the seed up.",
    )
    t.tell(
        '"Wait," said {f}. "Good things take time."',
        '"Be patient," said {f}. "It is growing where you cannot see it."',
        '"Sing to it," said {f}. "And do not give up."',
    )
    trouble, care = t.draw.choose(WORRIES)
    t.cast.update(trouble=trouble, care=care)
    t.tell("{trouble} But {h} {care}.", "{trouble} So {h} and {f} {care}.")
    t.paragraph()
    t.tell(
        "And then, one morning, a green leaf looked out of the ground.",
        "At last, a tiny green leaf came up {p}.",
        "One warm morning, something tiny and green stood {p}.",
    )
    t.tell(
        '"{f.call}, come and look!" shouted {h}.',
        '"It is alive!" cried {h}, and ran to get {f}.',
        "{h} jumped for joy and called {f}.",
    )
    t.tell(
        "By summer, the {plant} was {grown}.",
        "Week after week it grew, and soon the {plant} was {grown}.",
        "It grew and grew, until the {plant} was {grown}.",
    )
    t.tell(
        '"You were right," said {h}. "I only had to wait."',
        '"It was worth the wait," said {h}. "Thank you, {f.call}."',
        '"You did it," said {f}. "You were patient."',
    )
    goodbye(
        t,
        "When autumn came, {h} gave one of the new seeds to {f}.",
        "Everyone came to see the {plant} {p}.",
        "And {h} had learned to wait.",
        "In the evening, {h} and {f} sat beside the {plant} and watched the sun go down.",
    )

"""The demo model's data: public-domain English and generated questions about facts in the context.

Text comes from a folder with `kjv.txt`, `shakespeare.txt` and `speeches.txt`. Whole chapters, one
whole play and whole speeches are held out, picked by a hash of their own text.

Tasks are conversations that state facts and ask for them later. Every draw comes from a seeded
generator. The rule both sides keep: a combination of entities (Anna, dog, Rufus) belongs to training
or to the held-out tests, decided by its hash alone, so no list of exclusions has to travel. The words
themselves are all seen in training; what is new in a test is which of them go together, so only the
context can answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from random import Random

HELD_OUT_TEXT = 0.07  # of the chapters and speeches: with the play, about 5 % of the bytes
HELD_OUT_COMBINATIONS = 0.10
KINDS = ("pet", "age", "colour", "value", "quote")
DISTANCES: tuple[str | int, ...] = ("short", 256, 1024)

# How each play of the file begins; the last one is held out whole.
PLAY_OPENINGS = (
    "First Citizen:\nBefore we proceed any further",
    "GLOUCESTER:\nNow is the winter of our discontent",
    "KING RICHARD II:\nOld John of Gaunt",
    "SAMPSON:\nGregory, o' my word",
    "WARWICK:\nI wonder how the king escaped our hands",
    "ARCHIDAMUS:\nIf you shall chance, Camillo",
    "DUKE VINCENTIO:\nEscalus.",
    "SLY:\nI'll pheeze you",
    "Master:\nBoatswain!",
)
SPEECH_TITLE = re.compile(r"^(?=[^a-z\n]*(?:ADDRESS|MESSAGE)[^a-z\n]*(?:CONGRESS|PROMISE)[^a-z\n]*$)", re.MULTILINE)
SENTENCE_END = re.compile(r"(?<=[.!?;:]) +")


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


PEOPLE = _words("""Alice Anna Arthur Beatrice Ben Carol Charles Clara Daniel David Diana Edith Edward Ella Emma
Ethan Felix Frank George Grace Hannah Harold Helen Henry Ida Irene Isaac Jack Jacob James Jane Joan John
Joseph Julia Karl Kate Laura Leo Louis Lucy Maria Mark Martha Martin Mary Michael Nancy Nina Nora Oliver
Oscar Paul Peter Philip Rachel Robert Rosa Ruth Samuel Sarah Simon Sofia Stephen Susan Teresa Thomas Victor
Walter William""")
SPECIES = _words("dog cat horse rabbit parrot goat pony turtle mouse donkey")
PETS = _words("""Amber Bandit Bella Biscuit Blaze Bruno Buddy Buttons Casper Cleo Clover Coco Comet Daisy Dusty Echo
Fern Ginger Hazel Holly Honey Jasper Juno Lady Lucky Luna Maggie Max Midnight Milo Misty Molly Nugget Oreo
Patch Peanut Pepper Pip Poppy Prince Rex Ruby Rufus Rusty Sandy Scout Shadow Smoky Socks Sparky Star Storm
Sunny Teddy Tiger Toby Topaz Willow Winnie Ziggy""")
COLOURS = _words("black blue brown gold green grey orange pink purple red silver violet white yellow")
ITEMS = _words("""basket blanket book bottle bowl box candle carpet chair clock coat cup curtain door hat kettle key
lamp mirror piano plate ring rope shirt sofa stool table towel vase wheel""")
PLACES = _words("attic barn cellar church garden garage hall kitchen library office parlour school shop stable tower")
WORDS = _words("""apple arrow bridge castle cloud copper coral corn desert dragon drum eagle earth falcon feather field
fire flame forest fox glass grape harbor hill ice iron island ivory lemon lily lion maple marble meadow moon
mountain ocean olive panther pearl pine planet rain river rocket rose sand shell silk snow spear stone summer
sun thunder tree valley velvet water whale wind winter wolf""")
ACKNOWLEDGEMENTS = ("Noted.", "I will remember that.", "Understood.")


@dataclass(frozen=True)
class Query:
    """A question and its one right reply; `answer` is the part of the reply that only the context tells."""

    question: str
    before: str
    answer: str
    after: str

    @property
    def reply(self) -> str:
        return self.before + self.answer + self.after


@dataclass(frozen=True)
class Fact:
    """A statement, what may be asked about it, and who it is about; a conversation names no subject twice."""

    statement: str
    queries: tuple[Query, ...]
    subjects: frozenset[tuple[str, ...]]
    combinations: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class RecallCase:
    """A test: messages that end with a question, the expected reply, and the answer inside the reply."""

    kind: str
    messages: tuple[dict[str, str], ...]
    reply: str
    answer: str

    def is_correct(self, generated: str) -> bool:
        """Whether the first line of a generated reply gives the answer."""
        return self.answer in generated.strip().split("\n")[0]


def split_text(folder: str | Path) -> tuple[list[str], list[str]]:
    """Documents of the text folder: (training, held out)."""
    folder = Path(folder)
    plays = _plays((folder / "shakespeare.txt").read_text(encoding="utf-8"))
    # Text before the first title is the inaugural addresses, which nothing in the file separates.
    inaugurals, *speeches = SPEECH_TITLE.split((folder / "speeches.txt").read_text(encoding="utf-8"))
    chapters = (folder / "kjv.txt").read_text(encoding="utf-8").split("\n\n")
    train, held_out = [text.strip() for text in (*plays[:-1], inaugurals)], [plays[-1].strip()]
    for document in filter(None, (text.strip() for text in (*chapters, *speeches))):
        (held_out if fraction(document) < HELD_OUT_TEXT else train).append(document)
    return train, held_out


def filler_lines(documents: Sequence[str]) -> list[str]:
    """Sentences of 30 to 240 characters: what stands between a fact and its question."""
    lines = (line.strip() for text in documents for part in text.split("\n") for line in SENTENCE_END.split(part))
    return [line for line in lines if 30 <= len(line) <= 240]


def fraction(*words: str) -> float:
    """A number in [0, 1) that depends on the words alone."""
    return int.from_bytes(blake2b("\0".join(words).encode(), digest_size=6).digest(), "big") / 2**48


def is_held_out(kind: str, *entities: str) -> bool:
    """Whether this combination of entities is for tests only."""
    return fraction("combination", kind, *entities) < HELD_OUT_COMBINATIONS


def draw_fact(kind: str, rng: Random, lines: Sequence[str], *, held_out: bool = False) -> Fact:
    """A fact of this kind; all its combinations are on the wanted side of the hold-out."""
    while True:
        fact = _DRAW[kind](rng, lines, held_out)
        if all(is_held_out(kind, *combination) == held_out for combination in fact.combinations):
            return fact


def draw_facts(
    count: int, rng: Random, lines: Sequence[str], *, taken: frozenset[tuple[str, ...]] = frozenset()
) -> list[Fact]:
    """Training facts of mixed kinds about different subjects, none of them `taken`."""
    facts: list[Fact] = []
    while len(facts) < count:
        fact = draw_fact(rng.choice(KINDS), rng, lines)
        if not fact.subjects & taken:
            facts.append(fact)
            taken |= fact.subjects
    return facts


def recall_cases(
    kind: str,
    distance: str | int,
    count: int,
    *,
    seed: int,
    lines: Sequence[str],
    count_tokens: Callable[[str], int],
    held_out: bool = True,
) -> list[RecallCase]:
    """Tests with one fact, other facts to distract, and at least `distance` tokens up to the question.

    `lines` (see `filler_lines`) fill the distance; "short" has none. `count_tokens` measures a text.
    The same arguments give the same cases.
    """
    cases = []
    for index in range(count):
        rng = Random(f"{kind} {distance} {seed} {index} {held_out}")
        fact = draw_fact(kind, rng, lines, held_out=held_out)
        others = [f.statement for f in draw_facts(rng.randint(0, 3), rng, lines, taken=fact.subjects)]
        filler = [] if distance == "short" else _fill(int(distance), rng, lines, count_tokens)
        for statement in others:
            filler.insert(rng.randint(0, len(filler)), statement)
        query = fact.queries[0]
        messages = _arrange(fact.statement, filler, query.question, rng)
        cases.append(RecallCase(kind, messages, query.reply, query.answer.strip()))
    return cases


def _plays(text: str) -> list[str]:
    starts = [text.index(opening) for opening in PLAY_OPENINGS]
    return [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)], strict=True)]


def _fill(tokens: int, rng: Random, lines: Sequence[str], count_tokens: Callable[[str], int]) -> list[str]:
    filler: list[str] = []
    while tokens > 0:
        filler.append(rng.choice(lines))
        tokens -= count_tokens(filler[-1])
    return filler


def _arrange(statement: str, filler: list[str], question: str, rng: Random) -> tuple[dict[str, str], ...]:
    """One long message, or the fact, the filler and the question in turns of their own."""
    if rng.random() < 0.5:
        return ({"role": "user", "content": "\n".join([statement, *filler, question])},)
    messages = []
    for lines in ([statement], filler):
        if lines:
            messages.append({"role": "user", "content": "\n".join(lines)})
            messages.append({"role": "assistant", "content": rng.choice(ACKNOWLEDGEMENTS)})
    return (*messages, {"role": "user", "content": question})


def _pet(rng: Random, lines: Sequence[str], held_out: bool) -> Fact:
    owner = "me" if rng.random() < 0.3 else rng.choice(PEOPLE)
    species, name = rng.choice(SPECIES), rng.choice(PETS)
    whose, has, reply = ("my", "I have", "Your") if owner == "me" else (f"{owner}'s", f"{owner} has", f"{owner}'s")
    statements = f"{whose[0].upper()}{whose[1:]} {species} is named {name}.", f"{has} a {species} named {name}."
    questions = (
        f"What is {whose} {species}'s name?",
        f"What is the name of {whose} {species}?",
        f"What is {whose} {species} called?",
    )
    query = Query(rng.choice(questions), f"{reply} {species} is named", f" {name}", ".")
    return Fact(rng.choice(statements), (query,), frozenset({("pet", owner, species)}), ((owner, species, name),))


def _age(rng: Random, lines: Sequence[str], held_out: bool) -> Fact:
    old, young = rng.sample(PEOPLE, 2)
    young_age, old_age = sorted(rng.sample(range(10, 100), 2))
    (a, a_age), (b, b_age) = rng.sample([(old, old_age), (young, young_age)], 2)
    c, d = rng.sample([a, b], 2)
    question = rng.choice((f"Who is older, {c} or {d}?", f"Which of the two is older, {c} or {d}?"))
    queries = (
        Query(question, "The older one is", f" {old}", "."),
        Query(f"How old is {a}?", f"{a} is", f" {a_age}", " years old."),
        Query(f"How old is {b}?", f"{b} is", f" {b_age}", " years old."),
    )
    statement = f"{a} is {a_age} years old and {b} is {b_age} years old."
    return Fact(statement, queries, frozenset({("age", a), ("age", b)}), ((min(a, b), max(a, b)),))


def _colour(rng: Random, lines: Sequence[str], held_out: bool) -> Fact:
    item, place, colour = rng.choice(ITEMS), rng.choice(PLACES), rng.choice(COLOURS)
    thing = f"the {item} in the {place}"
    statement = rng.choice((f"The {item} in the {place} is {colour}.", f"There is a {colour} {item} in the {place}."))
    question = rng.choice((f"What colour is {thing}?", f"What is the colour of {thing}?"))
    query = Query(question, f"The {item} in the {place} is", f" {colour}", ".")
    return Fact(statement, (query,), frozenset({("colour", item, place)}), ((item, place, colour),))


def _value(rng: Random, lines: Sequence[str], held_out: bool) -> Fact:
    pairs: dict[str, str] = {}
    size = rng.randint(2, 5)
    while len(pairs) < size:
        word, code = rng.choice(WORDS), str(rng.randint(1000, 9999))
        if is_held_out("value", word, code) == held_out:
            pairs.setdefault(word, code)
    title = rng.choice(("Remember these values", "Here is a list of codes", "Keep this table"))
    statement = f"{title}: " + ", ".join(f"{word} = {code}" for word, code in pairs.items()) + "."
    ask = rng.choice(("What is the value of {}?", "Which value belongs to {}?"))
    queries = [Query(ask.format(word), f"{word} =", f" {code}", ".") for word, code in pairs.items()]
    rng.shuffle(queries)
    return Fact(statement, tuple(queries), frozenset(("value", word) for word in pairs), tuple(pairs.items()))


def _quote(rng: Random, lines: Sequence[str], held_out: bool) -> Fact:
    speaker, words = rng.choice(PEOPLE), re.findall(r"[A-Za-z]+(?:'[a-z]+)?", rng.choice(lines))
    size = rng.randint(3, 8)
    start = rng.randint(0, max(0, len(words) - size))
    phrase = " ".join(words[start : start + size])
    question = rng.choice((f"What did {speaker} say?", f"Repeat what {speaker} said."))
    query = Query(question, f'{speaker} said: "', phrase, '".')
    return Fact(f'{speaker} said: "{phrase}".', (query,), frozenset({("quote", speaker)}), ((speaker, phrase),))


_DRAW: dict[str, Callable[[Random, Sequence[str], bool], Fact]] = {
    "pet": _pet,
    "age": _age,
    "colour": _colour,
    "value": _value,
    "quote": _quote,
}

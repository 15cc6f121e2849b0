"""The wordings of the generated tasks: RULER's own, the passkey's, and paraphrases, some never trained on.

A paraphrase is a statement, a question and the beginning of an answer that are drawn independently, about one of many
attributes; the fixed wordings ask as they state.
"""

from typing import NamedTuple


class Wording(NamedTuple):
    """How a fact is stated and asked for; `{key}` and `{value}` are filled in."""

    fact: str
    question: str
    prefix: str
    """Beginning of the answer, up to the space before the value."""
    intro: str = ""
    any_value: bool = False
    """Whether values may be words and UUIDs, not only numbers."""
    many: tuple[str, str] = ("", "")
    """Question and prefix for a key with several values."""
    several: tuple[str, str] = ("", "")
    """Question and prefix for several keys at once."""

    def state(self, key: str, value: str) -> str:
        return self.fact.format(key=key, value=value)

    @property
    def many_fact(self) -> bool:
        return bool(self.many[0])


def _ruler(kind: str, question: str) -> Wording:
    plural = f"What are all the special magic {kind}s for {{key}} mentioned in the provided text?"
    prefix = f"The special magic {kind}s for {{key}} mentioned in the provided text are"
    return Wording(
        fact=f"One of the special magic {kind}s for {{key}} is: {{value}}.",
        question=question.format(kind=kind),
        prefix=f"The special magic {kind} for {{key}} mentioned in the provided text is",
        intro=f"Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind}s afterwards.",
        any_value=True,
        many=(plural, prefix),
        several=(plural, prefix),
    )


_ONE = "What is the special magic {kind} for {{key}} mentioned in the provided text?"
_ALL = "What are all the special magic {kind}s for {{key}} mentioned in the provided text?"

RULER = tuple(_ruler(kind, question) for question in (_ONE, _ALL) for kind in ("number", "number", "word", "uuid"))
"""RULER's (arXiv 2404.06654), asked in the singular as there, and in the plural."""

PASSKEY = Wording(
    fact="The pass key is {value}. Remember it. {value} is the pass key.",
    question="What is the pass key?",
    prefix="The pass key is",
    intro="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.",
)

WORDINGS = (
    Wording(
        "The secret code of the {key} is {value}.",
        "What is the secret code of the {key}?",
        "The secret code of the {key} is",
    ),
    Wording(
        "The access number for {key} is {value}.",
        "What is the access number for {key}?",
        "The access number for {key} is",
    ),
    Wording("Remember that {key} has the number {value}.", "Which number does {key} have?", "{key} has the number"),
    Wording("The pass key for {key} is {value}.", "What is the pass key for {key}?", "The pass key for {key} is"),
    Wording("The room of {key} is number {value}.", "What is the room of {key}?", "The room of {key} is number"),
    Wording("{key} was given the badge {value}.", "Which badge was {key} given?", "{key} was given the badge"),
    Wording("Call {key} at {value}.", "At which number can one call {key}?", "Call {key} at"),
    Wording(
        "The locker of {key} opens with {value}.", "What opens the locker of {key}?", "The locker of {key} opens with"
    ),
    Wording("Note: {key} = {value}.", "What is {key}?", "{key} ="),
    Wording("In the register, {key} is listed under {value}.", "Under what is {key} listed?", "{key} is listed under"),
    Wording("The account of {key} is {value}.", "Give the account of {key}.", "The account of {key} is"),
    Wording(
        "The serial number of the {key} reads {value}.", "What does the serial number of the {key} read?", "It reads"
    ),
    Wording(
        "The magic number of {key} is {value}.", "Tell me the magic number of {key}.", "The magic number of {key} is"
    ),
    Wording("Parcel {key} weighs {value} grams.", "How many grams does parcel {key} weigh?", "Parcel {key} weighs"),
    Wording(
        "The answer to the riddle of {key} is {value}.", "What is the answer to the riddle of {key}?", "The answer is"
    ),
    Wording("Agent {key} uses the password {value}.", "Which password does agent {key} use?", "The password is"),
)

HELD_OUT = (
    Wording(
        "The combination for {key} is {value}.", "What is the combination for {key}?", "The combination for {key} is"
    ),
    Wording("Ticket {value} belongs to {key}.", "Which ticket belongs to {key}?", "The ticket of {key} is"),
    Wording(
        "The winning number of {key} was {value}.",
        "What was the winning number of {key}?",
        "The winning number of {key} was",
    ),
)
"""Never trained on."""

HELD_OUT_ATTRIBUTES = frozenset(("combination", "ticket"))
"""Not to be drawn as attributes, as HELD_OUT asks for them."""

ATTRIBUTES = (
    *("code", "access code", "secret code", "entry code", "door code", "key", "pass key", "password", "passphrase"),
    *("number", "phone number", "serial number", "account number", "room number", "house number", "badge number"),
    *("order number", "lucky number", "secret number", "special number", "locker number", "flight number", "PIN"),
    *("identifier", "badge", "label", "mark", "sign", "name", "title", "token", "signature", "reference", "address"),
    *("weight", "height", "length", "price", "cost", "age", "score", "record", "distance", "temperature", "population"),
    *("balance", "salary", "rank", "year", "date", "volume", "depth", "speed", "shelf", "seat", "gate", "channel"),
    *("secret", "answer", "solution", "result", "value", "total", "amount", "quantity", "limit", "frequency"),
)

FACTS = (
    "The {attribute} of {key} is {value}.",
    "The {attribute} for {key} is {value}.",
    "{key}'s {attribute} is {value}.",
    "{value} is the {attribute} of {key}.",
    "{key} has the {attribute} {value}.",
    "{key} uses {value} as {attribute}.",
    "For {key}, the {attribute} is {value}.",
    "Remember that the {attribute} of {key} is {value}.",
    "Do not forget: the {attribute} for {key} is {value}.",
    "Please note that {key} has {value} as its {attribute}.",
    "As everybody knows, the {attribute} of {key} is {value}.",
    "It is written that {value} is the {attribute} for {key}.",
    "{attribute} of {key}: {value}.",
    "{key}: {attribute} {value}.",
    "{key} ({attribute}: {value}).",
    "If you look for the {attribute} of {key}, it is {value}.",
    "They gave {key} the {attribute} {value}.",
    "The {attribute} that {key} got is {value}, they said.",
    "The {attribute} of {key} is {value}. Keep it in mind.",
    "The {attribute} of {key} is {value}. Remember it. {value} is the {attribute} of {key}.",
)
"""Statements about an attribute of a name."""

QUESTIONS = (
    "What is the {attribute} of {key}?",
    "What is the {attribute} for {key}?",
    "What is {key}'s {attribute}?",
    "Which {attribute} does {key} have?",
    "What {attribute} does {key} use?",
    "Tell me the {attribute} of {key}.",
    "Give the {attribute} for {key}.",
    "Please find the {attribute} of {key} in the text above.",
    "What does the text say about the {attribute} of {key}?",
    "I forgot the {attribute} of {key}. What is it?",
    "Do you remember the {attribute} for {key}?",
    "For {key}, what is the {attribute}?",
    "According to the text, what is the {attribute} of {key}?",
    "What is the {attribute} of {key} mentioned in the provided text?",
    "{attribute} of {key}?",
    "{key}: {attribute}?",
)

ANSWERS = (
    "The {attribute} of {key} is",
    "The {attribute} for {key} is",
    "{key}'s {attribute} is",
    "The {attribute} of {key} mentioned in the provided text is",
    "The {attribute} is",
    "The answer is",
    "It is",
    "",
)
"""Beginnings of answers; in chats always the first."""

BARE_FACTS = (
    "The {key} is {value}. Remember it. {value} is the {key}.",
    "The {key} is {value}.",
    "The {key} is {value}. Keep it in mind.",
    "The {key} is: {value}.",
    "{value} is the {key}.",
    "Remember the {key}: {value}.",
    "Note that the {key} is {value}.",
    "Here is the {key}: {value}. Do not lose it.",
    "Do not forget that the {key} is {value}.",
    "By the way, the {key} is {value}.",
)
"""Statements about a thing that there is one of, as the passkey task makes them."""

BARE_QUESTIONS = (
    "What is the {key}?",
    "What was the {key}?",
    "Tell me the {key}.",
    "Give me the {key}.",
    "What is the {key} in the text above?",
    "Which {key} does the text mention?",
    "I forgot the {key}. What is it?",
    "The text mentions a {key}. What is it?",
    "{key}?",
)

BARE_ANSWERS = ("The {key} is", "The {key} mentioned in the text is", "It is", "The answer is", "")

FRAMES = (
    ("\n", " "),
    ("\n\n", "\n"),
    ("\nQuestion: ", "\nAnswer: "),
    ("\nQuestion: ", " Answer: "),
    ("\nQ: ", "\nA: "),
    (" ", " "),
)
"""Before a question, and between question and answer."""

LISTS = (
    ("", ":", "\n"),
    ("", " =", "\n"),
    ('"', '":', ",\n"),
    ("", " ->", "\n"),
    ('The value of "', '" is', ".\n"),
    ("#", " |", "\n"),
)
"""Before a key, between key and value (which begins with a space), and after the value."""

NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The passkey task's haystack, repeated (arXiv 2305.16300)."""

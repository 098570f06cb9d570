"""Offers: what simulated publishers mean to publish, and what will be wrong with it."""

from random import Random


class Offer:
    """One update that a publisher means to publish, and what is wrong with it."""

    def __init__(self, at: float, group: str) -> None:
        self.at = at
        self.group = group
        self.transfer = "staged"
        self.in_flight = "drain"
        self.drain_s = 1.0
        self.after_drain = "abort"
        self.partial = False
        self.new_run = False
        #: the committed weights once more, under the version that they had
        self.again = False
        #: nan, zero, unknown, missing, shape, backwards, truncated; elsewhere: it lends memory of another host, or engines
        #: cannot take it in place
        self.flaw = ""
        #: commit, never, abort, vanish: what the publisher does in the end, or on the way
        self.fate = "commit"
        self.seconds = 0.1
        #: commit is said before the bytes are sent
        self.early = False
        #: its outcome: published, or an error's code
        self.outcome = ""

    def __repr__(self) -> str:
        return f"<Offer {self.group} {self.transfer} {self.flaw or 'good'} {self.fate} {self.outcome}>"


def keep_generations(random: Random, offer: Offer) -> None:
    """Let generations stay in their engines during the update, or some of them, often enough."""
    if random.random() < 0.6:
        offer.in_flight = random.choice(("in_place", "retract"))
    elif offer.in_flight == "drain":
        offer.after_drain = random.choice(("abort", "in_place", "retract"))


def make_offer(random: Random, group: str, span: float, *, calm: bool) -> Offer:
    """Something to publish; with `calm` nothing is wrong with it."""
    offer = Offer(span * random.random(), group)
    offer.transfer = random.choices(("staged", "direct", "ipc", "checkpoint", "set_version"), (45, 13, 20, 9, 13))[0]
    offer.in_flight = random.choice(("drain", "abort"))
    offer.drain_s = random.choice((0.0, 0.05, 0.5, 3.0))
    offer.partial = offer.transfer in ("staged", "direct", "ipc") and random.random() < 0.12
    offer.new_run = not calm and random.random() < 0.1
    offer.seconds = random.choice((0.05, 0.5, 3.0))
    offer.early = random.random() < 0.3
    if not calm:
        if random.random() < 0.2:
            offer.flaw = random.choice(("nan", "zero", "unknown", "missing", "shape", "backwards", "truncated"))
            if offer.flaw in ("missing", "zero") and offer.partial:
                offer.flaw = ""
            if offer.transfer in ("checkpoint", "set_version") and offer.flaw not in ("unknown", "backwards"):
                offer.flaw = ""
            if offer.transfer == "set_version" and offer.flaw == "unknown":
                offer.flaw = ""
            if offer.transfer == "direct" and offer.flaw in ("nan", "zero"):
                offer.flaw = ""
            if offer.flaw == "backwards":
                offer.new_run = False
        if offer.transfer == "ipc" and not offer.flaw and random.random() < 0.06:
            offer.flaw = "elsewhere"
        offer.fate = random.choices(("commit", "never", "abort", "vanish"), (76, 8, 8, 8))[0]
        if offer.transfer in ("checkpoint", "set_version") and offer.fate == "never":
            offer.fate = "abort"
    return offer

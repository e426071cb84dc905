"""Who is to blame when ranks stand still: a pure function of what the ranks said of themselves. No torch."""

from collections.abc import Mapping
from typing import NamedTuple

from gpt2_ddp.processes.identity import Process

SILENCE = 10.0
"""Seconds without a sign of life that are forgiven in any case: loading a library may hold up a live process's threads
for several."""

AFTERMATH = 5.0
"""The same once a collective has failed somewhere, when somebody is likely to be dead."""

GRACE = 2.0
"""Seconds for what is about to be said or to end by itself; four signs of life."""


class Sign(NamedTuple):
    """A rank's sign of life.

    All its seconds were counted by the rank itself while it was awake: a process that was suspended counts none.

    Args:
        turn: of the watch's thread; a higher one is news.
        stage, step: where the main thread is.
        marks: times that it has said so in this step. collectives: that it has started. Both are equal on ranks that
            are equally far.
        idle: seconds without progress. limit: how many are taken for granted here.
        stack: of the main thread, once it has been idle for a while.
        failed: what this rank has raised.
        lost: what a collective failed with, because another rank is gone.
        left: it is done, and says no more.
    """

    process: Process
    turn: int = 0
    stage: str = "starting"
    step: int = 0
    marks: int = 0
    collectives: int = 0
    idle: float = 0.0
    limit: float = 120.0
    stack: str = ""
    failed: str = ""
    lost: str = ""
    left: bool = False


class Seen(NamedTuple):
    """A rank's last sign of life, and for how many seconds (of the observer's being awake) there has been no newer."""

    sign: Sign
    silent: float
    gone: bool = False
    """its process has ended, as can be told on the same machine"""


class Verdict(NamedTuple):
    """Why the ranks cannot go on.

    Args:
        reason: in full.
        stuck: the processes that have to be ended as they may not do it themselves.
        living: the ranks to blame that said so themselves: they have raised something, or make no progress.
    """

    reason: str
    stuck: list[Process]
    living: list[int]


def judge(seen: Mapping[int, Seen], patience: float) -> Verdict | None:
    """What all ranks' signs of life come to, if one of them, or all, will not go on.

    A rank without a sign of life for `patience` seconds is to blame, whatever it does; a live one once it has made no
    progress for as long as it may, if no other rank is further behind: the others only wait for it. In that order: a
    silent rank is heard first, since its last place may be old.
    """
    if verdict := judge_silence(seen, patience):
        return verdict
    running = {rank: one for rank, one in seen.items() if not one.sign.left}
    if not running or any(one.silent > GRACE or one.sign.failed or one.sign.lost for one in running.values()):
        return None
    last = min(_place(one.sign) for one in running.values())
    behind = {rank: one.sign for rank, one in running.items() if _place(one.sign) == last}
    if any(sign.idle <= sign.limit for sign in behind.values()):
        return None
    said = [f"{_name(rank, sign)}: no progress for {sign.idle:.0f} s{_where(sign)}" for rank, sign in behind.items()]
    return Verdict("\n".join(said), [], list(behind))


def judge_silence(seen: Mapping[int, Seen], patience: float) -> Verdict | None:
    """The same about ranks that say nothing any more: they raised something, ended without a word, or stand still."""
    running = {rank: one for rank, one in seen.items() if not one.sign.left}
    for rank, one in running.items():  # what it raised is why the others are lost
        if one.sign.failed and (one.silent > GRACE or one.sign.idle > AFTERMATH):
            return Verdict(f"{_name(rank, one.sign)}: {one.sign.failed} (at {_at(one.sign)})", [], [rank])
    if any(one.sign.failed for one in running.values()):
        return None
    limit = max(patience, SILENCE)
    if any(one.sign.lost for one in running.values()):
        limit = min(limit, AFTERMATH)
    said, stuck = [], []
    for rank, (sign, silent, gone) in running.items():
        if gone and silent > GRACE:
            said.append(f"{_name(rank, sign)}: ended without a word, last seen at {_at(sign)}; was it killed?")
        elif silent > limit:
            what = f"no sign of life for {silent:.0f} s, last seen{_where(sign)}"
            said.append(f"{_name(rank, sign)}: {what}")
            stuck.append(sign.process)
    return Verdict("\n".join(said), stuck, []) if said else None


def _place(sign: Sign) -> tuple[int, int, int]:
    return sign.step, sign.collectives, sign.marks


def _name(rank: int, sign: Sign) -> str:
    return f"rank {rank} on {sign.process.host}"


def _at(sign: Sign) -> str:
    return sign.stage + (f", step {sign.step}" if sign.step else "")


def _where(sign: Sign) -> str:
    return f" at {_at(sign)}" + (f"\n{sign.stack}" if sign.stack else "")

"""Kills a process that saves, with SIGKILL from inside, before each operation on files; then resumes.

`python -m tests.launch.saving.killed_saves FOLDER partial|full N` prints a JSON list: for every Nth operation
what was resumed after it. Children are forked from one warmed-up parent, so that hundreds take seconds.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

import smp_lite as smp
from tests.api_support import batch, build, in_memory, same, train, wrap

_CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_CLEARING = 8
"""Operations of a save by which it has cleared what a killed one left behind."""


def before_each_change(call: Callable[[str], None]) -> None:
    """From now on `call` sees each operation of this process that changes files, before it is done."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _CHANGES or (event == "open" and args[2] & _WRITING):
            call(f"{event} {' '.join(str(each) for each in args[:2])}")

    sync, write = os.fsync, torch.save

    def watched_sync(descriptor: int) -> None:
        call(f"fsync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        sync(descriptor)

    def watched_write(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        call("half a file")  # what is buffered is not written yet

    os.fsync, torch.save = watched_sync, watched_write  # type: ignore[assignment]
    sys.addaudithook(hook)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def content(index: int) -> Any:
    """The second save has no user content, so that what the first one had must go."""
    return None if index == 1 else {"save": index}


class Trial:
    """Three saves with a step before each: two of tag "t", one of "u" that retires older partial ones."""

    def __init__(self, folder: Path, *, is_partial: bool) -> None:
        self.folder, self.is_partial = folder, is_partial
        self.root, self.report = folder / "checkpoints", folder / "report"
        self.model, self.optimizer = wrap(build(), lambda p: torch.optim.AdamW(p, lr=0.01))
        train(self.model, *batch(0))  # partitions it
        self.start = self.state()
        self.states = []
        for index in range(3):
            self.step(index)
            self.states.append(self.state())

    def state(self) -> Any:
        return copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def rewind(self) -> None:
        self.model.load_state_dict(self.start[0])
        self.optimizer.load_state_dict(self.start[1])

    def step(self, index: int) -> None:
        self.optimizer.zero_grad()
        train(self.model, *batch(index))
        self.optimizer.step()

    def save(self, tag: str, user_content: Any = None, keep: int | None = None) -> None:
        smp.save_checkpoint(
            self.root,
            tag,
            partial=self.is_partial,
            model=self.model,
            optimizer=self.optimizer,
            user_content=user_content,
            num_kept_partial_checkpoints=keep,
        )

    def save_all(self, done: Callable[[], None]) -> None:
        for index, tag in enumerate("ttu"):
            self.step(index)
            self.save(tag, content(index), keep=1 if index == 2 else None)
            done()

    def resumed(self, tag: str | None) -> int | str | None:
        """Which save is resumed, whole; None: there is none; a text: what is wrong."""
        try:
            found = smp.resume_from_checkpoint(self.root, tag=tag, partial=self.is_partial)
        except FileNotFoundError:
            return None
        except Exception as error:
            return repr(error)
        state = self.state()
        for index, wanted in enumerate(self.states):
            if same(state, wanted):
                right = found == content(index)
                return index if right else f"save {index} with user content {found}"
        return "model and optimizer are of no one save"

    def all_resumed(self) -> dict[str, Any]:
        return {str(tag): self.resumed(tag) for tag in (None, "t", "u")}

    def killed(self, number: int, work: Callable[[Callable[[], None]], None]) -> dict[str, Any] | None:
        """Kills `work` before its operation of that number; None: it has no more than that."""
        self.report.unlink(missing_ok=True)

        def count_and_work() -> None:
            operations = done = 0
            report = os.open(self.report, os.O_WRONLY | os.O_CREAT)

            def count_and_die(operation: str) -> None:
                nonlocal operations
                if operations == number:
                    os.write(report, json.dumps({"operation": operation, "done": done}).encode())
                    die()
                operations += 1

            def one_more() -> None:
                nonlocal done
                done += 1

            self.rewind()
            before_each_change(count_and_die)
            work(one_more)

        status = in_child(count_and_work)
        if status == 0:
            return None
        assert os.WTERMSIG(status) == signal.SIGKILL, f"a save ended with status {status}"
        return json.loads(self.report.read_text())

    def killed_once(self, number: int) -> dict[str, Any] | None:
        """What is resumed after a kill, and again after the next save, which must leave nothing behind."""
        shutil.rmtree(self.root, ignore_errors=True)
        outcome = self.killed(number, self.save_all)
        if outcome is None:
            return None

        def look() -> None:
            before = self.all_resumed()
            self.rewind()
            self.save("v")
            left = [path.name for path in self.root.iterdir() if path.name.startswith(".")]
            found = {"found": before, "left": left, "later": self.all_resumed()}
            self.report.write_text(json.dumps({**outcome, **found}))

        assert in_child(look) == 0
        return json.loads(self.report.read_text())

    def killed_twice(self, number: int) -> list[dict[str, Any]]:
        """The next save is killed as well, while it clears up."""
        outcomes = []
        for second in range(_CLEARING):
            shutil.rmtree(self.root, ignore_errors=True)
            first = self.killed(number, self.save_all)
            next_one = self.killed(second, lambda _: self.save("v"))
            assert first is not None and next_one is not None
            assert in_child(lambda: self.report.write_text(json.dumps(self.all_resumed()))) == 0
            found = json.loads(self.report.read_text())
            outcomes.append({**first, "operation": next_one["operation"], "found": found})
        return outcomes


def in_child(work: Callable[[], Any]) -> int:
    """Runs it in a fork of this process; its wait status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def main(folder: Path, *, is_partial: bool, one_in: int) -> dict[str, list[dict[str, Any]]]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    in_memory(2)
    trial = Trial(folder, is_partial=is_partial)
    once = [*takewhile(bool, map(trial.killed_once, count(step=one_in)))]
    twice = []
    for number, outcome in zip(count(step=one_in), once, strict=False):
        if outcome["done"] == 1 and outcome["operation"].startswith(("os.rename", "os.remove")):
            twice += trial.killed_twice(number + 1)
    return {"once": once, "twice": twice}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), is_partial=sys.argv[2] == "partial", one_in=int(sys.argv[3]))))

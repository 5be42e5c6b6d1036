"""Progress of a run on a terminal, or a line a stage without one."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from pagedkern.autotune.report.console import say
from pagedkern.autotune.report.formats import time_text

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkern.autotune.space import Candidate

NARROW = 60  # columns; a bar would leave no room for words on fewer


class Progress:
    """A bar over the time budget with what happens now and the best so far; without a terminal that can draw one, a
    line for each stage. It is drawn between measurements only, by the thread that measures. That nobody can see it, for
    the terminal is gone or the pipe broken, disturbs nothing."""

    def __init__(
        self, console: Console, budget: float, clock: Callable[[], float] = time.monotonic, begun: float | None = None
    ) -> None:
        """`begun`: when the budget began, on the clock; None is now."""
        from rich import progress

        self._console, self._budget, self._clock = console, budget, clock
        self._seen: set[str] = set()
        self._gone = False
        self._drawn = 0.0
        self._draws = console.is_terminal and not console.is_dumb_terminal and console.width >= NARROW
        columns = ("{task.description}", progress.BarColumn(20), "{task.fields[left]}", "{task.fields[best]}")
        self._bar = progress.Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=budget, left="", best="")
        self._begin = clock() if begun is None else begun

    def __enter__(self) -> Progress:
        if self._draws:
            self._quietly(self._bar.start)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._draws:
            self._quietly(self._bar.stop)

    def tell(self, step: str, best: Candidate | None, seconds: float | None) -> None:
        """See `runner.Tell`."""
        self._quietly(lambda: self._tell(step, best, seconds))

    def _tell(self, step: str, best: Candidate | None, seconds: float | None) -> None:
        now = self._clock()
        if not self._draws:
            stage = step.partition(" - ")[0]
            if stage not in self._seen:
                self._seen.add(stage)
                say(self._console, f"{now - self._begin:5.0f} s  {stage}")
        elif now - self._drawn > 0.1:
            self._drawn = now
            so_far = f"best {time_text(seconds)}, block {best.block_size}" if best and seconds else ""
            self._bar.update(
                self._task,
                completed=min(now - self._begin, self._budget),
                description=step[:40],
                left=f"{max(0.0, self._budget - now + self._begin):.0f} s left",
                best=so_far,
            )
            self._bar.refresh()

    def _quietly(self, draw: Callable[[], None]) -> None:
        if self._gone:
            return
        try:
            draw()
        except (OSError, ValueError):  # a pipe that broke, a terminal that is gone, a file that was closed
            self._gone = True

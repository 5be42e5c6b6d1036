"""Progress of a run on a terminal, or a line a stage without one."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from pagedkern.autotune.report.formats import time_text
from pagedkern.autotune.search import COMPILING, LAYING_OUT

if TYPE_CHECKING:
    from rich.console import Console

    from pagedkern.autotune.space import Candidate


class Progress:
    """A bar over the time budget with what happens now and the best so far; without a terminal, one line a stage.

    Time spent on preparations, which the budget does not count, is not counted here either. It is drawn between
    measurements only, by the thread that measures.
    """

    def __init__(self, console: Console, budget: float) -> None:
        from rich import progress

        self._console = console
        self._budget = budget
        self._stage = ""
        self._drawn = 0.0
        columns = ("{task.description}", progress.BarColumn(20), "{task.fields[left]}", "{task.fields[best]}")
        self._bar = progress.Progress(*columns, console=console, auto_refresh=False, transient=True)
        self._task = self._bar.add_task("", total=budget, left="", best="")
        self._begin = self._start = self._last = time.monotonic()
        self._preparing = True

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def tell(self, step: str, best: Candidate | None, seconds: float | None) -> None:
        """See `search.Tell`."""
        now = time.monotonic()
        if self._preparing:
            self._start += now - self._last
        self._last = now
        stage = step.partition(" - ")[0]
        self._preparing = stage.endswith((LAYING_OUT, COMPILING))
        if not self._console.is_terminal:
            if stage != self._stage:
                self._stage = stage
                note = ", not counted in the budget" if self._preparing else ""
                self._console.print(f"{now - self._begin:5.0f} s  {stage}{note}", highlight=False)
        elif now - self._drawn > 0.1:
            self._drawn = now
            left = f"{max(0.0, self._budget - now + self._start):.0f} s left" if not self._preparing else "not counted"
            so_far = f"best {time_text(seconds)}, block {best.block_size}" if best and seconds else ""
            self._bar.update(
                self._task,
                completed=min(now - self._start, self._budget),
                description=step[:40],
                left=left,
                best=so_far,
            )
            self._bar.refresh()

"""The progress of prepare-text on a terminal."""

from __future__ import annotations


class Progress:
    """A bar on stderr that counts bytes of input, or nothing."""

    def __init__(self, shown: bool) -> None:
        from rich import progress
        from rich.console import Console

        self._shown = shown
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not shown,
        )

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        # Older versions of rich end even a bar that is not shown with an empty line.
        if self._shown:
            self._bar.stop()

    def begin(self, note: str, total: int) -> None:
        """Start counting anew."""
        for task in self._bar.task_ids:
            self._bar.remove_task(task)
        self._task = self._bar.add_task(note, total=total)

    def advance(self, size: int) -> None:
        """Count bytes that are done."""
        self._bar.advance(self._task, size)

"""What a person who trains can do something about."""

from __future__ import annotations


class TrainingError(RuntimeError):
    """What happened and where, and on a second line what to do next."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(f"{what}\n{hint}")
        self.what = what
        self.hint = hint

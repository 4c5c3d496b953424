"""What the ranks of Horovod's workers have stored, by scope and turn (``store``), and its bound."""

from __future__ import annotations

_ALL_BYTES = 256 << 20
_SCOPE_BYTES, _KEY_BYTES = 1024, 256
"""What Python takes for each beside its name and value."""
_NAME = "rank_"


class Room:
    """The bytes that all together may take."""

    def __init__(self, size: int = _ALL_BYTES) -> None:
        self.left = size

    def take(self, size: int) -> bool:
        """Take so many; False if there are not."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        """Give so many back."""
        self.left += size


class Value:
    """What was stored; its room is taken until nobody is being sent it, either."""

    def __init__(self, data: bytes, room: Room) -> None:
        self.data = data
        self._room = room
        self._users = 1

    @property
    def held_back(self) -> int:
        """Give how much room there will be once it is replaced."""
        return len(self.data) if self._users == 1 else 0

    def use(self) -> None:
        """Have one more who needs it."""
        self._users += 1

    def let_go(self) -> None:
        """Have one less."""
        self._users -= 1
        if not self._users:
            self._room.give(len(self.data))


class _Scope:
    """What the ranks of one scope have stored."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.turns: dict[str, int] = {}
        """How often each rank has met all others; of one that has not, nothing."""
        self.turn = 0
        """The newest turn in which something was stored."""


class Scopes:
    """Values by scope and key, of the newest turn."""

    def __init__(self, room: Room | None = None) -> None:
        self._scopes: dict[str, _Scope] = {}
        self._room = room or Room()

    def put(self, scope: str, key: str, value: bytes) -> bool:
        """Store a value; False if there is no room for it."""
        found = self._scopes.get(scope)
        old = found.values.get(key) if found is not None else None
        size = len(value)
        if found is None:
            size += _SCOPE_BYTES + len(scope)
        if old is None and (found is None or key not in found.turns):
            size += _KEY_BYTES + len(key)
        if size > self._room.left + (0 if old is None else old.held_back):
            return False
        if found is None:
            found = self._scopes[scope] = _Scope()
        if old is not None:
            old.let_go()
        self._room.take(size)
        found.values[key] = Value(value, self._room)
        found.turn = max(found.turn, found.turns.get(key.removeprefix(_NAME), 0))
        return True

    def get(self, scope: str, key: str) -> Value | None:
        """Give a value; None if it is not there, or was stored before others have begun anew."""
        found = self._scopes.get(scope)
        if found is None or found.turns.get(key.removeprefix(_NAME), 0) != found.turn:
            return None
        return found.values.get(key)

    def finish(self, scope: str, rank: str) -> None:
        """Take in that a rank has met all others: none needs its values any more. Saying so again changes nothing."""
        found = self._scopes.get(scope)
        if found is None or rank not in found.values:
            return
        found.turns[rank] = found.turns.get(rank, 0) + 1  # has the room of its key from now on
        for key in (rank, _NAME + rank):
            if key in found.values:
                found.values.pop(key).let_go()
                if key not in found.turns:
                    self._room.give(_KEY_BYTES + len(key))

"""Who comes next into a batch: deficit round robin over tenants, by tokens and weight."""

from collections import deque

from gateway.embeddings.part import Part

_QUANTUM_TOKENS = 32
_LEAST_WEIGHT = 1 / 64  # of what is configured below this, rounds without end would come


class _Flow:
    """What one tenant has waiting, and how many tokens of its turn it has left."""

    __slots__ = ("credit_tokens", "parts")

    def __init__(self) -> None:
        self.parts: deque[Part] = deque()
        self.credit_tokens = 0.0


class Lane:
    """Parts that wait, in order within a tenant, in turn between tenants."""

    def __init__(self) -> None:
        self._waiting: dict[Part, None] = {}  # oldest first
        self._flows: dict[str, _Flow] = {}  # whose turn it is first
        self.items = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"<Lane {len(self)} parts, {self.items} items, {self.tokens} tokens, {len(self._flows)} tenants>"

    def join(self, part: Part, now: float) -> None:
        """Take a place at the end of the tenant's line."""
        part.joined_seconds = now
        self._waiting[part] = None
        self.items += part.items
        self.tokens += part.tokens
        flow = self._flows.get(part.tenant)
        if flow is None:
            flow = self._flows[part.tenant] = _Flow()
        flow.parts.append(part)

    def leave(self, part: Part) -> bool:
        """Give the place up; False if the part does not wait here any more."""
        if part not in self._waiting:
            return False
        self._drop(part)
        flow = self._flows[part.tenant]
        flow.parts.remove(part)
        if not flow.parts:
            del self._flows[part.tenant]
        return True

    @property
    def oldest_seconds(self) -> float:
        """When the one who waits longest came. Only while somebody waits."""
        return next(iter(self._waiting)).joined_seconds

    @property
    def next_items(self) -> int:
        """Inputs of the part that a batch would begin with."""
        return next(iter(self._flows.values())).parts[0].items if self._flows else 0

    def take(self, max_items: int, max_tokens: int) -> list[Part]:
        """The next batch: at least one part, and more while they fit. What must be alone is."""
        taken: list[Part] = []
        items = tokens = 0
        while self._flows:
            tenant, flow = next(iter(self._flows.items()))
            part = flow.parts[0]
            fits = not taken or (
                items + part.items <= max_items and tokens + part.tokens <= max_tokens and not part.alone
            )
            if not fits:
                break
            if part.tokens > flow.credit_tokens and len(self._flows) > 1:
                flow.credit_tokens += _QUANTUM_TOKENS * max(_LEAST_WEIGHT, part.weight)
                if part.tokens > flow.credit_tokens:
                    self._to_the_end(tenant)
                    continue
            flow.credit_tokens = max(0.0, flow.credit_tokens - part.tokens)
            flow.parts.popleft()
            self._drop(part)
            taken.append(part)
            items, tokens = items + part.items, tokens + part.tokens
            if not flow.parts:
                del self._flows[tenant]
            elif flow.parts[0].tokens > flow.credit_tokens:
                self._to_the_end(tenant)
            if part.alone:
                break
        return taken

    def _to_the_end(self, tenant: str) -> None:
        self._flows[tenant] = self._flows.pop(tenant)

    def _drop(self, part: Part) -> None:
        del self._waiting[part]
        self.items -= part.items
        self.tokens -= part.tokens

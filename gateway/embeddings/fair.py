"""Who comes next into a batch: deficit round robin over tenants, by tokens and weight.

Credit is counted in whole units, so that many rounds at once come to just what they come to one by one.
"""

from collections import OrderedDict

from gateway.embeddings.part import Part

_UNITS = 65536  # of credit, in a token
_QUANTUM = 32 * _UNITS  # of a tenant of weight 1, in each round


class _Flow:
    """What one tenant has waiting, and how much of its turn it has left."""

    __slots__ = ("credit", "parts")

    def __init__(self) -> None:
        self.parts: OrderedDict[Part, None] = OrderedDict()  # oldest first
        self.credit = 0

    @property
    def first(self) -> Part:
        """The part that has waited for longest."""
        return next(iter(self.parts))

    @property
    def quantum(self) -> int:
        """The credit of one round."""
        return max(1, round(_QUANTUM * self.first.weight))

    @property
    def missing(self) -> int:
        """The credit that its first part needs besides what is there; 0 or less = none."""
        return self.first.tokens * _UNITS - self.credit


class Lane:
    """Parts that wait, in order within a tenant, in turn between tenants.

    What is taken from the front leaves gaps in a `dict`, so that each look at its front takes longer.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Part, None] = OrderedDict()  # oldest first
        self._flows: OrderedDict[str, _Flow] = OrderedDict()  # whose turn it is first
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
        flow.parts[part] = None

    def leave(self, part: Part) -> bool:
        """Give the place up; False if the part does not wait here any more."""
        if part not in self._waiting:
            return False
        self._drop(part)
        flow = self._flows[part.tenant]
        del flow.parts[part]
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
        return next(iter(self._flows.values())).first.items if self._flows else 0

    def take(self, max_items: int, max_tokens: int) -> list[Part]:
        """The next batch: at least one part, and more while they fit. What must be alone is."""
        taken: list[Part] = []
        items = tokens = passed = 0
        while self._flows:
            tenant, flow = next(iter(self._flows.items()))
            part = flow.first
            fits = not taken or (
                items + part.items <= max_items and tokens + part.tokens <= max_tokens and not part.alone
            )
            if not fits:
                break
            if flow.missing > 0 and len(self._flows) > 1:
                flow.credit += flow.quantum
                if flow.missing > 0:
                    self._flows.move_to_end(tenant)
                    passed += 1
                    if passed == len(self._flows):
                        self._pass_rounds()
                        passed = 0
                    continue
            passed = 0
            flow.credit = max(0, -flow.missing)
            del flow.parts[part]
            self._drop(part)
            taken.append(part)
            items, tokens = items + part.items, tokens + part.tokens
            if not flow.parts:
                del self._flows[tenant]
            elif flow.missing > 0:
                self._flows.move_to_end(tenant)
            if part.alone:
                break
        return taken

    def _pass_rounds(self) -> None:
        """Nobody could afford anything in a whole round: add the next ones, up to the one in which somebody can."""
        flows = self._flows.values()
        rounds = min(-(-flow.missing // flow.quantum) for flow in flows) - 1
        for flow in flows:
            flow.credit += rounds * flow.quantum

    def _drop(self, part: Part) -> None:
        del self._waiting[part]
        self.items -= part.items
        self.tokens -= part.tokens

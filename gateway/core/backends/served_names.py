"""Names of models: finds the names of the same weights, from backends' lists."""

from collections.abc import Sequence

from gateway.core.backends.facts import ModelCard


class ServedNames:
    """Relations between listed names of models; other parts keep the dictionaries, which are changed in place.

    vLLM lists each of its served names with the same root, and answers with the first one. LoRA adapters have a parent.
    """

    def __init__(self) -> None:
        self.families: dict[str, str] = {}  # the model that a name's engines serve; for an adapter its base
        self.weights: dict[str, str] = {}  # the first name of the same weights, except for adapters
        self.first: dict[str, str] = {}  # of names that answers do not have: the first one on the same backends

    def update(self, lists: Sequence[Sequence[ModelCard]]) -> bool:
        """Read the lists of all backends again; returns whether a name says something else now."""
        families, places = dict[str, str](), dict[str, list[tuple[int, str]]]()
        answered: dict[tuple[int, str], str] = {}
        for number, cards in enumerate(lists):
            by_root: dict[str, str] = {}
            for card in cards:
                families.setdefault(card.id, card.parent or by_root.setdefault(card.root or card.id, card.id))
                if card.root and not card.parent:
                    answered.setdefault((number, card.root), card.id)
                    places.setdefault(card.id, []).append((number, card.root))
        firsts: dict[tuple[tuple[int, str], ...], str] = {}
        first = {name: firsts.setdefault(tuple(where), name) for name, where in places.items()}
        named = {name for name, where in places.items() if all(answered[place] == name for place in where)}
        changed = False
        for kept, found in (
            (self.families, families),
            (self.weights, {name: families[name] for name in places}),
            (self.first, {name: model for name, model in first.items() if name not in named or model != name}),
        ):
            if kept != found:
                kept.clear()
                kept.update(found)
                changed = True
        return changed

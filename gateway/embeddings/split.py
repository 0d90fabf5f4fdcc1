"""Cutting a long list of inputs into pieces of about the same size, and sharing counts out."""

from collections.abc import Sequence


def pieces(tokens: Sequence[int], max_items: int, max_tokens: int, replicas: int = 1) -> list[range]:
    """Ranges of inputs that each keep to the budget, in order; one, if all keep to it together.

    A list that has to be cut is cut into at least as many pieces as there are replicas, if it has as many inputs. An
    input over the budget is a piece of its own.
    """
    count, total = len(tokens), sum(tokens)
    if count <= max_items and (total <= max_tokens or count == 1):
        return [range(count)]
    wanted = max(-(-count // max_items), -(-total // max_tokens), min(replicas, count))
    fair_items, fair_tokens = min(max_items, -(-count // wanted)), min(max_tokens, -(-total // wanted))
    cut: list[range] = []
    start = filled = 0
    for number, needed in enumerate(tokens):
        over = filled + needed > max_tokens or number - start >= fair_items or filled >= fair_tokens
        if number > start and over:
            cut.append(range(start, number))
            start, filled = number, 0
        filled += needed
    cut.append(range(start, count))
    return cut


def shares(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `total`, in proportion to the weights (largest remainders)."""
    whole = sum(weights)
    if not whole:
        weights, whole = [1.0] * len(weights), float(len(weights))
    exact = [total * weight / whole for weight in weights]
    parts = [int(each) for each in exact]
    by_rest = sorted(range(len(parts)), key=lambda number: parts[number] - exact[number])
    for number in by_rest[: total - sum(parts)]:
        parts[number] += 1
    return parts

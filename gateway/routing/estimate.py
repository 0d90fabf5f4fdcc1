"""Running estimates learned from what engines report: bytes per token, and tokens per answer."""


class Estimates:
    """Fleet-wide estimates; one model's ratio is its own."""

    def __init__(self, bytes_per_token: float = 4.0, output_tokens: float = 200.0) -> None:
        self._start_ratio = bytes_per_token
        self._ratios: dict[str, tuple[float, int]] = {}
        self.output_tokens = output_tokens
        self._answers = 0

    def bytes_per_token(self, model: str) -> float:
        """Prompt bytes that make one token of this model; 4 until an answer has told."""
        known = self._ratios.get(model)
        return known[0] if known else self._start_ratio

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        """An answer's usage. Short prompts are mostly chat template and tell nothing of the ratio."""
        if prompt_tokens >= 64 and prompt_bytes >= 256:
            ratio, seen = self._ratios.get(model, (self._start_ratio, 0))
            weight = max(0.02, 1 / (seen + 1))
            sample = min(16.0, max(0.5, prompt_bytes / prompt_tokens))
            self._ratios[model] = (ratio + weight * (sample - ratio), seen + 1)
        if output_tokens > 0:
            self._answers = min(self._answers + 1, 500)
            self.output_tokens += (output_tokens - self.output_tokens) / self._answers

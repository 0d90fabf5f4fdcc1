"""A straight line through what was measured lately: y = a * u + b * v, by least squares that forget."""

_MEMORY = 64.0  # measurements


class LinearFit:
    """Learns two coefficients, neither below zero, from pairs of amounts and what they came to together.

    Starts from a guess that counts as one measurement at each of two points, so that it is never without an answer.
    """

    __slots__ = ("_uu", "_uv", "_uy", "_vv", "_vy")

    def __init__(self, a: float, b: float, u: float = 1.0, v: float = 1.0) -> None:
        self._uu, self._uv, self._vv = u * u, 0.0, v * v
        self._uy, self._vy = a * u * u, b * v * v

    def learn(self, u: float, v: float, y: float) -> None:
        """One measurement."""
        keep = 1.0 - 1.0 / _MEMORY
        self._uu = self._uu * keep + u * u
        self._uv = self._uv * keep + u * v
        self._vv = self._vv * keep + v * v
        self._uy = self._uy * keep + u * y
        self._vy = self._vy * keep + v * y

    @property
    def coefficients(self) -> tuple[float, float]:
        """Both, as they fit best."""
        determinant = self._uu * self._vv - self._uv * self._uv
        if determinant > 1e-9 * self._uu * self._vv:
            a = (self._uy * self._vv - self._vy * self._uv) / determinant
            b = (self._vy * self._uu - self._uy * self._uv) / determinant
            if a >= 0 and b >= 0:
                return a, b
            return (0.0, self._vy / self._vv) if a < b else (self._uy / self._uu, 0.0)
        total = self._uu + self._vv  # everything lies on one line through the origin: both share what it came to
        shared = (self._uy + self._vy) / (total + 2 * self._uv)
        return shared, shared

    def at(self, u: float, v: float) -> float:
        """What these amounts come to."""
        a, b = self.coefficients
        return a * u + b * v

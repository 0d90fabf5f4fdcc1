"""Whether a server serves yet."""

import urllib.error
import urllib.request


def serves(url: str, timeout_seconds: float = 5.0) -> bool:
    """Whether a GET, by no proxy, is answered with 200."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(url, timeout=timeout_seconds) as answer:
            return int(answer.status) == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False
    except OSError:
        return False

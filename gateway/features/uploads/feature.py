"""Audio: uploads that are passed on while they arrive."""

from collections.abc import Mapping

from gateway.config import Config
from gateway.core.core import Core
from gateway.core.front.handler import RequestSource
from gateway.core.front.reply import RequestDispatcher
from gateway.core.front.routes import Route
from gateway.feature import Feature
from gateway.features.uploads.audio import UPLOAD_ROUTES, UPLOADS, Uploads


class UploadsFeature(Feature):
    """The endpoints of audio."""

    def __init__(self, core: Core) -> None:
        config = core.config
        self.uploads = Uploads(
            core.fleet,
            core.dispatcher,
            backlog=core.queue.backlog,
            max_wait_seconds=config.admission.max_wait_seconds,
            max_buffered_bytes=config.server.max_buffered_upload_bytes,
            clock=core.clock,
        )

    def routes(self) -> Mapping[tuple[bytes, bytes], Route]:
        return UPLOAD_ROUTES

    def sources(self) -> Mapping[str, RequestSource]:
        return {UPLOADS: self.uploads}

    def dispatchers(self) -> Mapping[str, RequestDispatcher]:
        return {UPLOADS: self.uploads}

    def apply(self, config: Config) -> None:
        self.uploads.apply(config.admission.max_wait_seconds, config.server.max_buffered_upload_bytes)

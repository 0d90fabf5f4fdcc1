"""All endpoints that a gateway may have: those of the core, and of every feature."""

from gateway.core.front.routes import ROUTES as CORE_ROUTES
from gateway.core.front.routes import RouteTable
from gateway.features.batches.routes import BATCH_ROUTES
from gateway.features.realtime.sessions import REALTIME_ROUTES
from gateway.features.uploads.audio import UPLOAD_ROUTES

_MORE = {**BATCH_ROUTES, **REALTIME_ROUTES, **UPLOAD_ROUTES}
ROUTES = {**CORE_ROUTES, **_MORE}
ALL_ROUTES = RouteTable(_MORE)
find_route = ALL_ROUTES.find

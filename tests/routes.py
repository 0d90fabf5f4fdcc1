"""All endpoints that a gateway may have: those of the core, and of every feature."""

from gateway.batches.routes import BATCH_ROUTES
from gateway.front.routes import ROUTES as CORE_ROUTES
from gateway.front.routes import RouteTable
from gateway.realtime.sessions import REALTIME_ROUTES
from gateway.uploads.audio import UPLOAD_ROUTES

_MORE = {**BATCH_ROUTES, **REALTIME_ROUTES, **UPLOAD_ROUTES}
ROUTES = {**CORE_ROUTES, **_MORE}
ALL_ROUTES = RouteTable(_MORE)
find_route = ALL_ROUTES.find

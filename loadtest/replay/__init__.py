"""A recorded trace through the gateway's own placement, and through other routers' rules, over modelled engines."""

"""How many instructions the gateway's own code runs per request, event and decision."""

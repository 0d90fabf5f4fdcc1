"""Checks of what deploys the gateway: the Helm chart and the systemd units."""

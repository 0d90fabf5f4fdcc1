"""Proxies side by side: what each costs, and what each makes of the engines' prefix caches."""

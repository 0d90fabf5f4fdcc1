"""Driving load."""

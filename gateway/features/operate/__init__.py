"""The operators' view and controls."""

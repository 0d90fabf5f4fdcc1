"""The load tester on running engines and behind a running gateway."""

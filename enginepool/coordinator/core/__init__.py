"""The decisions of the coordinator: `machine.handle(*events) -> list[Effect]`, and the state behind it. Pure."""

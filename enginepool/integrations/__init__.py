"""Adapters for other libraries. Each needs the library that it is named after; nothing else of enginepool imports them."""

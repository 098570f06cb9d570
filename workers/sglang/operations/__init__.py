"""The operations of rows, as SGLang runs them: one file each, and a table."""

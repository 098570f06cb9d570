"""What is replaced in SGLang, and the private names that this relies on."""

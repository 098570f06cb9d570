"""The process of a worker that receives new weights while the engine serves, and keeps the committed ones."""

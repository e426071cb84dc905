"""Images and their classes: where they come from (`sources`), as pixels and samples (`load`)."""

"""Images and their classes: where they come from (`sources`, `archives`), as pixels (`decode`), as samples (`load`)."""

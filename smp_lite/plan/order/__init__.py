"""In which order each stage runs its forwards, backwards and W."""

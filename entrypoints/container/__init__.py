"""What SageMaker puts into a container, read and checked, and what the user's script finds there."""

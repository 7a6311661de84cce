"""The trust regions: objective, optimizer step, certification, controllers."""

"""What may stand between "sent" and "read": a plain run has none of it."""

"""A controller's roster and real agents on hosts of their own, to be broken on purpose."""

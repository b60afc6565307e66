"""What holds for every test."""

import signal

# A test run that was started in the background by a shell inherits an ignored SIGINT, and so would the processes that
# tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

"""From a RunSpec to a finished run folder: the only place that knows processes, ports and deadlines."""

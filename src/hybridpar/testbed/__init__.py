"""A cluster in small on one machine: network namespaces with shaped links, CPU quotas as devices."""

"""The Requests screen: the table of requests and the page of one."""

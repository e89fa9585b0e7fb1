"""launch=ssh: plain hosts. An ssh session per host starts an agent there and keeps it alive."""

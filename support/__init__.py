"""What only serves the scripts: nobody needs to open it to understand a form of parallelism."""

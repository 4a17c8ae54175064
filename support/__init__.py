"""What only serves the scripts: nobody needs to open it to understand a form of parallelism."""

import os

# CUDA and torch's allocator read these at the first use of a GPU. All that uses one imports something from here before.
# At 95 % of the card, fragments are what does not fit
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
# streams share 8 queues by default, where a waiting receive would hold up the others
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

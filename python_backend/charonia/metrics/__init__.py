"""The metrics, and the pages that show them.

The way of a number from the line that counts it to Prometheus. `metric_table` says of both pages
which names, labels, help texts and buckets there are::

    scheduler's process     metrics       the values; the scheduling thread writes them
                              │  │
         once a second, and   │  │ page_socket: per token or step; asked for at each scrape
         at each scrape       │  │
    triton_page, other_names  │  └──────────────────────────┐
                              ▼                             ▼
    tritonserver            its own page ──── GET ────► merged_page    charonia serve
                                                            │
                                                        page_server ──► Prometheus
                                                                    ──► snapshot: charonia top
"""

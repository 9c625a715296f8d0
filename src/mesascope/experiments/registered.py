"""The claims that were written down, with their thresholds, before there were results. All others came later: variants
of controls, of what is measured, or of the panel; each says in its words how it differs."""

REGISTERED = {
    "fig2": {"fig2a-1", "fig2a-2", "fig2a-3", "fig2a-4", "fig2b-1", "fig2b-2"},
    "fig3": {"fig3a-1", "fig3b-1"},
    "fig4": {
        "fig4a-1", "fig4a-2", "fig4a-3", "fig4b-1", "fig4c-1", "fig4c-2", "fig4d-1", "fig4d-2", "fig4e-1", "fig4f-1",
    },
    "fig5": {"fig5a-1", "fig5a-2", "fig5a-3", "fig5b-1", "fig5b-2"},
    "fig6": {"fig6a-1", "fig6b-1", "fig6c-1"},
    "fig7": {"fig7a-1", "fig7a-2", "fig7b-1", "fig7b-2", "fig7c-1"},
    "fig8": {"fig8a-1", "fig8a-2", "fig8a-3", "fig8a-4", "fig8b-1"},
    "si-contracting": {f"si-contracting-{i}" for i in (1, 2, 3, 4)},
    "si-fixed-teacher": {"si-fixed-1", "si-fixed-2", "si-fixed-3"},
    "si-sensitivity": {"si-sens-1", "si-sens-2", "si-sens-3"},
    "si-tokens": {"si-fullmesa-1", "si-embed-1"},
    "si-partial": {"si-partial-1", "si-partial-2", "si-partial-3"},
    "si-nonlinear": {"si-nonlin-1", "si-nonlin-2", "si-nonlin-3"},
    "si-distilled": {"si-distil-1"},
    "si-noise": {"si-noise-1"},
    "si-icl-mesa": {f"si-icl-mesa-{i}" for i in (1, 2, 3, 4, 5)},
    "lm-keyshift": {"lm-1", "lm-2", "lm-3", "lm-6"},
    "lm-two-layers": {"lm-1-two-layers", "lm-2-two-layers", "lm-4"},
    "lm-four-layers": {"lm-1-four-layers", "lm-2-four-layers", "lm-5"},
    "lm-attention": {"lm-7"},
}  # fmt: skip

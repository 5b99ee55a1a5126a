"""Twenty prompts that differ in length, language, script and kind of text."""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: What is 12 times 12?\nA:",
    "Die Katze sitzt auf",
    "The",
    "La révolution française commença en",
    "日本の首都は",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "SELECT name, COUNT(*) FROM users WHERE",
    "🎉 Party time! 🎂 We need",
    "To be, or not to be, that is the question:\nWhether 'tis nobler in the mind to suffer",
    '{"name": "Alice", "age": 2024, "items": [',
    "Water boils at 100 degrees Celsius. Ice melts at",
    "# Introduction\n\nThis chapter explains how a compiler turns a program into machine code.\n\n## Parsing\n\n",
    "Привет, как",
    "In 1969 the first people walked on the Moon. They were Neil Armstrong and Buzz Aldrin, and they stayed "
    "for less than a day. Before them, ten other flights of the same programme had prepared the way: some in "
    "orbit around the Earth, some around the Moon, and one down to fifteen kilometres above its surface. The "
    "third man of the crew, Michael Collins, waited above in the command module. When they came back,",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
)

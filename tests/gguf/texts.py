"""A text of many scripts, whose lines tokenizers cut in different ways."""

LINES = [
    "Hello, world! It's  I'VE we'll 12345 3.14 don't\tTAB",
    "\n\n  indented\r\n x=foo_bar(1,2);// c++",
    "Привет, мир! Съешь же ещё этих мягких французских булок.",
    "你好，世界！我在2024年。こんにちは世界、カタカナ 안녕하세요 세계",
    "مرحبا بالعالم ١٢٣ שלום עולם Ελληνικά",
    "é e\u0301 Ünïcödé 🚀🦙👨\u200d👩\u200d👧 naïve CamelCaseWord HTTPServer iPhone",
    "हिन्दी में नमस्ते ไทยสวัสดี",
    "x²   \u00a0 nbsp “quotes” … — ñ",
    "call <tool> now",
    " lead",
    "trail  ",
    "",
]
TRAINING = [*LINES] * 3
